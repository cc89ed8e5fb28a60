"""The data that the project ships, as datasets of PyTorch."""

import gzip
import pathlib

import torch
from torch.utils.data import Dataset

DATA = pathlib.Path(__file__).resolve().parents[2] / "data"


class Digits(Dataset):
    """The first images of MNIST's `train` or `t10k`, normalized as in PyTorch's example."""

    def __init__(self, split, count):
        images = gzip.decompress((DATA / f"mnist/{split}-images-idx3-ubyte.gz").read_bytes())[16:]
        labels = gzip.decompress((DATA / f"mnist/{split}-labels-idx1-ubyte.gz").read_bytes())[8:]
        self.images = torch.frombuffer(bytearray(images), dtype=torch.uint8).reshape(-1, 1, 28, 28)[:count]
        self.labels = torch.frombuffer(bytearray(labels), dtype=torch.uint8).long()[:count]

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        return (self.images[index] / 255 - 0.1307) / 0.3081, self.labels[index]


def hamlet():
    """The play as a string."""
    return (DATA / "text/hamlet.txt").read_text()
