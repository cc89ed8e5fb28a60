"""pyarrow's side of `versus loader`. Answers each line `NAME TIMES` with the seconds that so many readings took.

It also writes the file that both sides read, with pyarrow's default settings except for the size of row groups.
`table` reads all columns and makes a tensor of each. `shuffled` reads the row groups in a random order, shuffles the
rows of each and splits them into batches; `ordered` only splits them. Both read the next row groups ahead on another
thread if that is faster.
"""

import functools
import json
import pathlib
import sys
import time
from concurrent.futures import ThreadPoolExecutor

try:
    import numpy
    import pyarrow
    import pyarrow.parquet
    import torch
except Exception as error:
    sys.exit(print(f"missing {type(error).__name__}: {error}".splitlines()[0], flush=True))


def write(path, options):
    """Writes columns of random numbers, float32 and int64."""
    if path.exists():
        return
    rng, rows = numpy.random.default_rng(0), options["rows"]
    floats = {f"float{i}": rng.standard_normal(rows, dtype=numpy.float32) for i in range(options["floats"])}
    integers = {f"integer{i}": rng.integers(0, 1_000_000, rows) for i in range(options["integers"])}
    aside = path.with_suffix(".part")
    pyarrow.parquet.write_table(pyarrow.table(floats | integers), aside, row_group_size=options["row_group"])
    aside.rename(path)


def tensors(table):
    def tensor(column):
        # Tensors are writable, so read-only arrays are copied.
        values = column.to_numpy()
        return torch.from_numpy(values if values.flags.writeable else values.copy())

    return {name: tensor(table[name]) for name in table.column_names}


def whole(path, _):
    return len(tensors(pyarrow.parquet.read_table(path))["float0"])


def batches(path, options, shuffled, ahead):
    file = pyarrow.parquet.ParquetFile(path)
    order = torch.randperm(file.num_row_groups).tolist() if shuffled else range(file.num_row_groups)
    rows = 0
    with ThreadPoolExecutor(1) as pool:
        groups = pool.map(file.read_row_group, order) if ahead else map(file.read_row_group, order)
        for group in groups:
            columns = tensors(group)
            if shuffled:
                permutation = torch.randperm(group.num_rows)
                columns = {name: column[permutation] for name, column in columns.items()}
            pieces = [column.split(options["batch_size"]) for column in columns.values()]
            for batch in zip(*pieces):
                rows += len(batch[0])
    return rows


def seconds(way, path, options, times=1):
    started = time.perf_counter()
    for _ in range(times):
        rows = way(path, options)
        assert rows == options["rows"], f"{rows} rows"
    return time.perf_counter() - started


def main():
    options = json.loads(sys.argv[1])
    path = pathlib.Path(options["path"])
    write(path, options)
    ways = {"table": whole}
    for name in ("ordered", "shuffled"):
        choices = [functools.partial(batches, shuffled=name == "shuffled", ahead=ahead) for ahead in (False, True)]
        times = [min(seconds(way, path, options) for _ in range(3)) for way in choices]
        print(f"pyarrow, {name}, seconds per epoch without and with reading ahead: {times}", file=sys.stderr)
        ways[name] = choices[times.index(min(times))]
    print(pyarrow.__version__, flush=True)
    for line in sys.stdin:
        name, count = line.split()
        print(seconds(ways[name], path, options, int(count)), flush=True)


if __name__ == "__main__":
    main()
