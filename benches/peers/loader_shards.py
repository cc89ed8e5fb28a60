"""webdataset's side of `versus loader`. Answers each line `NAME EPOCHS` with the seconds that those epochs took.

It also writes the shards that both sides read. `one` reads them in this process. `workers` reads them through a
WebLoader with persistent workers, which pass on single samples or lists of samples, whichever is faster.
"""

import json
import os
import pathlib
import sys
import time

try:
    import webdataset as wds
except Exception as error:
    sys.exit(print(f"missing {type(error).__name__}: {error}".splitlines()[0], flush=True))


def write(folder, options):
    """Writes shards of samples with random bytes, which cannot be compressed."""
    if folder.exists():
        return
    aside = folder.with_name(folder.name + ".part")
    aside.mkdir(parents=True, exist_ok=True)
    with wds.ShardWriter(str(aside / "%06d.tar"), maxcount=options["samples_a_shard"], verbose=0) as writer:
        for number in range(options["samples"]):
            writer.write({"__key__": f"{number:07}", "jpg": os.urandom(options["bytes"]), "cls": b"%d" % (number % 10)})
    aside.rename(folder)


def epoch(samples, expected):
    seen = 0
    for item in samples:
        for sample in item if isinstance(item, list) else [item]:
            seen += 1
            last = sample
    assert seen == expected and isinstance(last["jpg"], bytes), f"{seen} of {expected} samples"


def seconds(samples, expected, count=1):
    started = time.perf_counter()
    for _ in range(count):
        epoch(samples, expected)
    return time.perf_counter() - started


def main():
    options = json.loads(sys.argv[1])
    folder, expected = pathlib.Path(options["folder"]), options["samples"]
    write(folder, options)
    shards = sorted(map(str, folder.glob("*.tar")))

    def dataset():
        return wds.WebDataset(shards, shardshuffle=False)

    def with_workers(data):
        loader = wds.WebLoader(data, batch_size=None, num_workers=options["workers"], persistent_workers=True)
        epoch(loader, expected)
        return loader

    ways = {"one": dataset()}
    choices = [with_workers(dataset()), with_workers(dataset().listed(options["batch_size"]))]
    times = [seconds(choice, expected) for choice in choices]
    print(f"WebLoader, seconds per epoch by sample and by list: {times}", file=sys.stderr)
    ways["workers"] = choices[times.index(min(times))]
    del choices
    print(wds.__version__, flush=True)
    for line in sys.stdin:
        name, count = line.split()
        print(seconds(ways[name], expected, int(count)), flush=True)


if __name__ == "__main__":
    main()
