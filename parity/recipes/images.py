"""Writes pictures of eight classes as tensors: decoded from JPEG files, which other decoders would read differently.

    python images.py OUT.safetensors
"""

import io
import sys

import numpy
import torch
from PIL import Image
from safetensors.torch import save_file

CLASSES, SIZE = 8, 64


def picture(label, random):
    """Stripes whose direction is the class, in random colors, with a camera's noise."""
    y, x = numpy.mgrid[:SIZE, :SIZE] / SIZE
    angle = numpy.pi * label / CLASSES
    wave = numpy.sin(20 * (x * numpy.cos(angle) + y * numpy.sin(angle)) + random.uniform(0, 6))
    color = random.uniform(40, 110, 3)
    pixels = 128 + wave[:, :, None] * color + random.normal(0, 12, (SIZE, SIZE, 3))
    file = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype("uint8")).save(file, "JPEG", quality=90)
    return torch.from_numpy(numpy.array(Image.open(file))).permute(2, 0, 1)


def pictures(count, seed):
    random = numpy.random.default_rng(seed)
    labels = torch.arange(count) % CLASSES
    return torch.stack([picture(int(label), random) for label in labels]).contiguous(), labels


if __name__ == "__main__":
    train, val = pictures(320, 0), pictures(64, 1)
    tensors = {"train.images": train[0], "train.labels": train[1], "val.images": val[0], "val.labels": val[1]}
    save_file(tensors, sys.argv[1])
