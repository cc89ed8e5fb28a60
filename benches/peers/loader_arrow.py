"""pyarrow's side of `versus loader` for record batches. Answers each line `convert BATCHES` with the seconds taken.

Each column becomes a tensor by numpy's view of it, without a copy. Such tensors must not be written to, because Arrow's
memory is read-only; ours may be.
"""

import json
import sys
import time
import warnings

try:
    import numpy
    import pyarrow
    import torch
except Exception as error:
    sys.exit(print(f"missing {type(error).__name__}: {error}".splitlines()[0], flush=True))


def main():
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    # That the tensors are not to be written to.
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    names = [f"column{number}" for number in range(options["columns"])]
    columns = [pyarrow.array(numpy.arange(options["rows"], dtype=numpy.float32)) for _ in names]
    print(pyarrow.__version__, flush=True)
    for line in sys.stdin:
        _, count = line.split()
        batches = [pyarrow.RecordBatch.from_arrays(columns, names) for _ in range(int(count))]
        started = time.perf_counter()
        tables = [
            {name: torch.from_numpy(batch.column(name).to_numpy(zero_copy_only=True)) for name in names}
            for batch in batches]
        seconds = time.perf_counter() - started
        assert len(tables) == int(count) and tables[0]["column0"].shape == (options["rows"],)
        print(seconds, flush=True)


if __name__ == "__main__":
    main()
