"""spdl's side of `versus loader`. Answers each line `NAME EPOCHS` with the seconds that those epochs took.

`own` decodes, crops, scales (bilinear, with antialiasing) and flips images with FFmpeg on `workers` threads, without
Python's global interpreter lock, and copies those of a batch into one uint8 tensor. `torchvision` runs torchvision's
decoder and transforms on the same threads. The threads pass on images or whole batches, whichever is faster. Without
`crop`, whole images are scaled.
"""

import importlib.metadata
import json
import math
import pathlib
import random
import sys
import time

try:
    import spdl.io
    import torch
    from spdl.pipeline import PipelineBuilder
    from torchvision.io import ImageReadMode, decode_jpeg, read_file
    from torchvision.transforms import v2
    version = importlib.metadata.version("spdl")
    CONFIG = spdl.io.decode_config(decoder_options={"threads": "1"})
except Exception as error:
    sys.exit(print(f"missing {type(error).__name__}: {error}".splitlines()[0], flush=True))

SCALE, RATIO, SIDE = (0.08, 1.0), (3 / 4, 4 / 3), 224
CROPS = json.loads(sys.argv[1])["crop"]
RESIZE = v2.RandomResizedCrop(SIDE, antialias=True) if CROPS else v2.Resize((SIDE, SIDE), antialias=True)
TRAIN = v2.Compose([RESIZE, v2.RandomHorizontalFlip()])


def region(width, height):
    """A random region, drawn as torchvision's RandomResizedCrop does: width, height, left and top."""
    for _ in range(10):
        area = width * height * random.uniform(*SCALE)
        ratio = math.exp(random.uniform(math.log(RATIO[0]), math.log(RATIO[1])))
        w, h = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < w <= width and 0 < h <= height:
            return w, h, random.randint(0, width - w), random.randint(0, height - h)
    side = min(width, height)
    return side, side, (width - side) // 2, (height - side) // 2


def decode(sample):
    path, label = sample
    packets = spdl.io.demux_image(path)
    crop = ""
    if CROPS:
        w, h, x, y = region(packets.width, packets.height)
        crop = f"crop={w}:{h}:{x}:{y}:exact=1,"
    flip = "hflip," if random.random() < 0.5 else ""
    graph = f"{crop}scale={SIDE}:{SIDE}:flags=bilinear,{flip}format=pix_fmts=rgb24"
    return spdl.io.decode_packets(packets, filter_desc=graph, decode_config=CONFIG), label


def collate(loaded):
    frames, labels = zip(*loaded)
    images = spdl.io.to_torch(spdl.io.convert_frames(list(frames)))
    return images.permute(0, 3, 1, 2), torch.tensor(labels)


def decode_with_torchvision(sample):
    path, label = sample
    return TRAIN(decode_jpeg(read_file(path), mode=ImageReadMode.RGB)), label


def collate_with_torchvision(loaded):
    images, labels = zip(*loaded)
    return torch.stack(images), torch.tensor(labels)


WAYS = {"own": (decode, collate), "torchvision": (decode_with_torchvision, collate_with_torchvision)}


def by_image(samples, size, workers, load, collate_fn):
    builder = PipelineBuilder().add_source(samples).pipe(load, concurrency=workers)
    return builder.aggregate(size).pipe(collate_fn).add_sink(2 * workers).build(num_threads=workers)


def by_batch(samples, size, workers, load, collate_fn):
    """Each thread makes whole batches, so less is passed between threads."""
    batches = [samples[i:i + size] for i in range(0, len(samples), size)]
    builder = PipelineBuilder().add_source(batches)
    builder = builder.pipe(lambda batch: collate_fn(map(load, batch)), concurrency=workers)
    return builder.add_sink(2 * workers).build(num_threads=workers)


def epoch(build_pipeline, way, samples, options):
    samples = random.sample(samples, len(samples))
    pipeline = build_pipeline(samples, options["batch_size"], options["workers"], *WAYS[way])
    seen = 0
    with pipeline.auto_stop():
        for images, _ in pipeline.get_iterator():
            assert images.dtype == torch.uint8 and images.shape[1:] == (3, SIDE, SIDE)
            seen += len(images)
    assert seen == len(samples), f"{seen} of {len(samples)} images"


def seconds(build_pipeline, way, samples, options, epochs=1):
    started = time.perf_counter()
    for _ in range(epochs):
        epoch(build_pipeline, way, samples, options)
    return time.perf_counter() - started


def faster(way, samples, options):
    """`by_image` or `by_batch`, whichever has the shortest of two epochs after a warm-up epoch."""
    times = {}
    for build_pipeline in (by_image, by_batch):
        times[build_pipeline] = min([seconds(build_pipeline, way, samples, options) for _ in range(3)][1:])
    print(f"spdl, {way}:", {build.__name__: round(time, 3) for build, time in times.items()}, file=sys.stderr)
    return min(times, key=times.get)


def main():
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    folders = sorted(path for path in pathlib.Path(options["photos"]).iterdir() if path.is_dir())
    samples = [(str(path), label) for label, folder in enumerate(folders) for path in sorted(folder.glob("*.jpg"))]
    best = {way: faster(way, samples, options) for way in WAYS}
    print(version, flush=True)
    for line in sys.stdin:
        way, count = line.split()
        print(seconds(best[way], way, samples, options, int(count)), flush=True)


if __name__ == "__main__":
    main()
