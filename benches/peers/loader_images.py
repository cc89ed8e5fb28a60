"""PyTorch's side of `versus loader` for photographs. Answers each line `NAME EPOCHS` with the seconds taken.

`pillow` and `io` are DataLoaders with persistent workers that decode with pillow or with torchvision.io. Each has the
torchvision transforms that are faster on its decoder's images: v1 on pillow's images, v2 on uint8 tensors. Whole epochs
are timed, so that the workers of one are idle while the other is timed. `startup` makes a DataLoader with new workers,
and takes its first batch. With `crop`, images are cropped at random and scaled; without, whole images are.
"""

import json
import sys
import time

try:
    import torch
    import torchvision
    from PIL import Image, __version__ as pillow
    from torch.utils.data import DataLoader
    from torchvision import datasets, transforms
    from torchvision.io import ImageReadMode, decode_jpeg, read_file
    from torchvision.transforms import v2
except Exception as error:
    sys.exit(print(f"missing {type(error).__name__}: {error}".splitlines()[0], flush=True))


def decode_with_pillow(path):
    return Image.open(path).convert("RGB")


def decode_with_io(path):
    return decode_jpeg(read_file(path), mode=ImageReadMode.RGB)


def folder(options, name):
    crops = options["crop"]
    if name == "pillow":
        scale = transforms.RandomResizedCrop(224) if crops else transforms.Resize((224, 224))
        train = transforms.Compose([scale, transforms.RandomHorizontalFlip(), transforms.PILToTensor()])
        return datasets.ImageFolder(options["photos"], train, loader=decode_with_pillow)
    scale = v2.RandomResizedCrop(224, antialias=True) if crops else v2.Resize((224, 224), antialias=True)
    train = v2.Compose([scale, v2.RandomHorizontalFlip()])
    return datasets.ImageFolder(options["photos"], train, loader=decode_with_io)


def loader(dataset, options, prefetch_factor=2, persistent=True):
    return DataLoader(
        dataset, options["batch_size"], shuffle=True, num_workers=options["workers"], prefetch_factor=prefetch_factor,
        persistent_workers=persistent)


def epochs(batches, count=1):
    started = time.perf_counter()
    for _ in range(count):
        for images, _ in batches:
            assert images.dtype == torch.uint8 and images.shape[1:] == (3, 224, 224)
    return time.perf_counter() - started


def tuned(dataset, options):
    """The loader with the faster prefetch factor, compared by the second epoch of each."""
    loaders = {factor: loader(dataset, options, factor) for factor in (2, 8)}
    times = {}
    for factor, batches in loaders.items():
        epochs(batches)
        times[factor] = epochs(batches)
    print(f"DataLoader, seconds per epoch by prefetch_factor: {times}", file=sys.stderr)
    # The return drops the other loader, which ends its workers.
    return loaders.pop(min(times, key=times.get))


def startup(dataset, options):
    started = time.perf_counter()
    iterator = iter(loader(dataset, options, persistent=False))
    next(iterator)
    return time.perf_counter() - started


def main():
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    names = options["names"]
    sets = {name: folder(options, name) for name in ("pillow", "io")}
    loaders = {name: tuned(sets[name], options) for name in names if name in sets}
    print(f"{torch.__version__}, torchvision {torchvision.__version__}, pillow {pillow}", flush=True)
    for line in sys.stdin:
        name, count = line.split()
        if name == "startup":
            print(min(startup(data, options) for data in sets.values()), flush=True)
        else:
            print(epochs(loaders[name], int(count)), flush=True)


if __name__ == "__main__":
    main()
