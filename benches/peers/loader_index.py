"""PyTorch's side of `versus loader` for a large folder. Answers `scan 1` with the seconds that listing it took, and
`first 1` with the seconds from a listed folder to the first shuffled batch, in this process or with workers, whichever
is faster."""

import json
import sys
import time

try:
    import torch
    from torch.utils.data import DataLoader
    from torchvision.datasets import ImageFolder
    from torchvision.io import read_file
except Exception as error:
    sys.exit(print(f"missing {type(error).__name__}: {error}".splitlines()[0], flush=True))


def size_of(images):
    return [len(image) for image, _ in images]


def first(data, options):
    times = []
    for workers in (0, options["workers"]):
        started = time.perf_counter()
        loader = DataLoader(data, options["batch_size"], shuffle=True, num_workers=workers, collate_fn=size_of)
        iterator = iter(loader)
        next(iterator)
        times.append(time.perf_counter() - started)
        del iterator
    return min(times)


def main():
    options = json.loads(sys.argv[1])
    print(torch.__version__, flush=True)
    data = None
    for line in sys.stdin:
        name = line.split()[0]
        if name == "scan" or data is None:
            started = time.perf_counter()
            data = ImageFolder(options["folder"], loader=read_file)
            taken = time.perf_counter() - started
        print(taken if name == "scan" else first(data, options), flush=True)


if __name__ == "__main__":
    main()
