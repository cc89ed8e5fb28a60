"""Mosaic Streaming's side of `versus loader`. Answers each line `NAME EPOCHS` with the seconds that those epochs took.

It also writes the shards that both sides read. `one` reads them in this process, by iterating or by index, whichever is
faster. `workers` reads them through a DataLoader with persistent workers, which collate as PyTorch does or pass on lists
of samples, whichever is faster.
"""

import json
import os
import pathlib
import sys
import time

try:
    import importlib.metadata

    import torch
    from streaming import MDSWriter, StreamingDataset
    version = importlib.metadata.version("mosaicml-streaming")
except Exception as error:
    sys.exit(print(f"missing {type(error).__name__}: {error}".splitlines()[0], flush=True))


def write(folder, options):
    """Writes shards of samples with random bytes, which cannot be compressed."""
    if folder.exists():
        return
    aside = folder.with_name(folder.name + ".part")
    size = options["samples_a_shard"] * (options["bytes"] + 64)
    # `jpeg` would be decoded.
    columns = {"jpg": "bytes", "cls": "int"}
    with MDSWriter(out=str(aside), columns=columns, size_limit=size, exist_ok=True, progress_bar=False) as writer:
        for number in range(options["samples"]):
            writer.write({"jpg": os.urandom(options["bytes"]), "cls": number % 10})
    aside.rename(folder)


def epoch(samples, expected):
    """Counts samples, lists of samples, or batches, whose columns are lists."""
    seen = 0
    for item in samples:
        batch = item if isinstance(item, list) else [item]
        last = batch[-1]["jpg"]
        seen += len(last) if isinstance(last, list) else len(batch)
    last = last[-1] if isinstance(last, list) else last
    assert seen == expected and isinstance(last, bytes), f"{seen} of {expected} samples"


def seconds(samples, expected, count=1):
    started = time.perf_counter()
    for _ in range(count):
        epoch(samples, expected)
    return time.perf_counter() - started


class ByIndex:
    def __init__(self, dataset):
        self.dataset = dataset

    def __iter__(self):
        return (self.dataset[index] for index in range(len(self.dataset)))


def fastest(choices, expected):
    for choice in choices:
        epoch(choice, expected)
    times = [seconds(choice, expected) for choice in choices]
    print(f"seconds per epoch of each way: {times}", file=sys.stderr)
    return choices[times.index(min(times))]


def main():
    options = json.loads(sys.argv[1])
    folder, expected, batch_size = pathlib.Path(options["folder"]), options["samples"], options["batch_size"]
    write(folder, options)

    def dataset():
        return StreamingDataset(local=str(folder), shuffle=False, batch_size=batch_size)

    def with_workers(collate):
        return torch.utils.data.DataLoader(
            dataset(), batch_size, num_workers=options["workers"], collate_fn=collate, persistent_workers=True
        )

    ways = {"one": fastest([dataset(), ByIndex(dataset())], expected)}
    ways["workers"] = fastest([with_workers(None), with_workers(list)], expected)
    print(version, flush=True)
    for line in sys.stdin:
        name, count = line.split()
        print(seconds(ways[name], expected, int(count)), flush=True)


if __name__ == "__main__":
    main()
