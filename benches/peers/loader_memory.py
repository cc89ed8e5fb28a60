"""PyTorch's side of `versus loader` for samples in memory. Answers each line `NAME EPOCHS` with the seconds taken.

`best` is the fastest way to use DataLoader: sample by sample, or with one lookup per batch (`batch_size=None` and a
BatchSampler), each in this process or in persistent workers. `startup` is the time to the first batch of a new loader
with workers, sample by sample or batch by batch, whichever is faster.
"""

import json
import sys
import time

try:
    import torch
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset
except Exception as error:
    sys.exit(print(f"missing {type(error).__name__}: {error}".splitlines()[0], flush=True))


def by_sample(data, size, workers):
    return DataLoader(data, size, shuffle=True, num_workers=workers, persistent_workers=workers > 0)


def by_batch(data, size, workers):
    sampler = BatchSampler(RandomSampler(data), size, drop_last=False)
    return DataLoader(data, batch_size=None, sampler=sampler, num_workers=workers, persistent_workers=workers > 0)


def epochs(loader, count=1):
    started = time.perf_counter()
    for _ in range(count):
        for _ in loader:
            pass
    return time.perf_counter() - started


def fastest(data, size, workers):
    """The loader with the shortest epoch, of two each. Leaves libtorch with the number of threads of that loader."""
    times, most = {}, torch.get_num_threads()
    for way in (by_sample, by_batch):
        for processes, threads in ((0, 1), (0, most), (workers, 1)):
            torch.set_num_threads(threads)
            loader = way(data, size, processes)
            times[way, processes, threads] = min(epochs(loader) for _ in range(2))
    report = {f"{way.__name__}, {n} workers, {threads} threads": t for (way, n, threads), t in times.items()}
    print(f"DataLoader, seconds per epoch: {report}", file=sys.stderr)
    way, processes, threads = min(times, key=times.get)
    torch.set_num_threads(threads)
    loader = way(data, size, processes)
    epochs(loader)
    return loader


def startup(data, size, workers):
    times = []
    for way in (by_sample, by_batch):
        started = time.perf_counter()
        iterator = iter(way(data, size, workers))
        next(iterator)
        times.append(time.perf_counter() - started)
        del iterator
    return min(times)


def main():
    options = json.loads(sys.argv[1])
    samples, size, workers = options["samples"], options["batch_size"], options["workers"]
    images = torch.randint(256, (samples, 1, 28, 28), dtype=torch.uint8)
    data = TensorDataset(images, torch.randint(10, (samples,)))
    print(torch.__version__, flush=True)
    best = None
    for line in sys.stdin:
        name, count = line.split()
        if name == "startup":
            print(startup(data, size, workers), flush=True)
            continue
        if best is None:
            best = fastest(data, size, workers)
        print(epochs(best, int(count)), flush=True)


if __name__ == "__main__":
    main()
