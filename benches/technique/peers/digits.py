"""The digits, as most people write it with PyTorch, and tuned by hand."""

import gzip
import pathlib
import types

from common import COMPILED, DEVICE, FUSED, JOB, LEARNING_RATE, PRECISIONS, TUNED
from common import Precision, best, best_in_words, initial, serve, torch, tuned, usual_workers
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, transforms

MEAN, STD = 0.1307, 0.3081
BATCH = JOB["batch_size"]


class Cnn(nn.Sequential):
    def __init__(self):
        super().__init__(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Flatten(), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10),
        )


def images():
    transform = transforms.Compose([transforms.Grayscale(), transforms.ToTensor(), transforms.Normalize(MEAN, STD)])
    return datasets.ImageFolder(JOB["train"], transform)


def as_written(workers):
    return DataLoader(images(), batch_size=BATCH, shuffle=True, num_workers=workers)


class InMemory:
    """Decodes everything once with workers; a batch is then one indexing operation."""

    def __init__(self):
        decoded = DataLoader(images(), batch_size=500, num_workers=JOB["threads"])
        parts = list(decoded)
        self.images = torch.cat([images for images, _ in parts]).to(DEVICE)
        self.labels = torch.cat([labels for _, labels in parts]).to(DEVICE)

    def __iter__(self):
        order = torch.randperm(len(self.labels), device=DEVICE)
        for indices in order.split(BATCH):
            if COMPILED and len(indices) < BATCH:
                continue  # another shape would be compiled anew
            yield self.images[indices], self.labels[indices]


def test_set():
    def read(name, skip, shape):
        for path in (pathlib.Path(JOB["test"]) / name, pathlib.Path(JOB["test"]) / f"{name}.gz"):
            if path.exists():
                data = path.read_bytes()
                data = gzip.decompress(data) if path.suffix == ".gz" else data
                return torch.frombuffer(bytearray(data), dtype=torch.uint8, offset=skip).view(shape)
        raise FileNotFoundError(name)

    count = JOB["test_images"]
    pixels = read("t10k-images-idx3-ubyte", 16, (-1, 1, 28, 28))[:count]
    return (pixels / 255 - MEAN) / STD, read("t10k-labels-idx1-ubyte", 8, -1)[:count].long()


def build(workers=0, precision="float32", fused=None, loader=None):
    loader = loader or (InMemory() if TUNED else as_written(workers))
    model = initial(Cnn).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)
    forward = torch.compile(model) if COMPILED else model
    loss_of = nn.CrossEntropyLoss()
    precision = Precision(precision)

    def train(batches):
        model.train()
        total, inputs = torch.zeros((), device=DEVICE), 0
        for x, y in batches:
            x, y = x.to(DEVICE), y.to(DEVICE)
            optimizer.zero_grad()
            with precision.autocast():
                loss = loss_of(forward(x), y)
            precision.step(loss, optimizer)
            total += loss.detach() * len(y)
            inputs += len(y)
        return inputs, total.item() / max(inputs, 1)

    def accuracy():
        model.eval()
        x, y = test_set()
        with torch.no_grad():
            right = [(model(x.to(DEVICE)).argmax(-1) == y.to(DEVICE)).sum().item() for x, y in zip(x.split(250), y.split(250))]
        return sum(right) / len(y)

    parts = lambda: (loader for _ in range(JOB["length"]))
    read_ahead = 0 if TUNED else 2 * workers
    return types.SimpleNamespace(loader=loader, read_ahead=read_ahead, train=train, accuracy=accuracy, parts=parts)


if __name__ == "__main__":
    options = {}
    if TUNED:
        # Decoded once for all trials; without trials, by the contender itself.
        data = InMemory() if JOB["tries"] and not JOB["options"] else None
        tries = {"precision": PRECISIONS, "fused": FUSED}
        options, text = tuned({"fused": True}, tries, lambda **options: build(**options, loader=data))
        del data
    else:
        tried = usual_workers()
        options["workers"] = best(tried, build)
        text = best_in_words(options["workers"], tried, "worker")
    serve(lambda: build(**options), [text], options)
