"""Trains the technique benchmark's CNN for digits; Rust trains it from the same weights, in the same order."""

import gzip
import os
import pathlib

import torch
import torch.nn.functional as F
from harness import case

STEPS, BATCH = 50, 64


def mnist():
    """The shipped training images and labels, read from the idx files."""
    root = pathlib.Path(os.environ["OVERDRIVE_MNIST"])
    images = gzip.decompress((root / "train-images-idx3-ubyte.gz").read_bytes())
    labels = gzip.decompress((root / "train-labels-idx1-ubyte.gz").read_bytes())
    images = torch.frombuffer(bytearray(images[16:]), dtype=torch.uint8).reshape(-1, 1, 28, 28)
    return images, torch.frombuffer(bytearray(labels[8:]), dtype=torch.uint8).long()


class Cnn(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = torch.nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = torch.nn.Linear(32 * 7 * 7, 64)
        self.fc2 = torch.nn.Linear(64, 10)

    def forward(self, x):
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        return self.fc2(F.relu(self.fc1(x.flatten(1))))


@case
def mnist_cnn_losses(t):
    """50 steps: each loss to 1e-6 relative, and the weights after the last step."""
    images, labels = mnist()
    t.tell("mean", 0.1307)
    t.tell("std", 0.3081)
    t.tell("batch", BATCH)
    order = t.give("order", torch.randperm(20_000)[: STEPS * BATCH])
    model = Cnn()
    for name, param in model.named_parameters():
        t.give(name, param)
    opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    losses = []
    for indices in order.split(BATCH):
        x = ((images[indices].float() / 255.0) - 0.1307) / 0.3081
        loss = F.cross_entropy(model(x), labels[indices])
        opt.zero_grad()
        loss.backward()
        opt.step()
        losses.append(loss.detach())
    t.expect("losses", torch.stack(losses), rtol=1e-6)
    for name, param in model.named_parameters():
        t.expect("after." + name, param, rtol=1e-5, atol=1e-6)
