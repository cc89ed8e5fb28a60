"""The photographs, as most people write it with PyTorch, and tuned by hand."""

import types

from common import COMPILED, DEVICE, FUSED, JOB, LEARNING_RATE, PRECISIONS, TUNED
from common import Precision, best, best_in_words, initial, nice_worker, serve, torch, tuned, usual_workers
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader
from torchvision import datasets, io, models, transforms

NORMALIZE = transforms.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
BATCH = JOB["batch_size"]
SIDE = 224 if DEVICE.type == "cuda" else 96


class DraftCrop(transforms.RandomResizedCrop):
    """Decodes JPEG at a fraction of its size, as small as the crop allows."""

    def forward(self, image):
        width, height = image.size
        top, left, h, w = self.get_params(image, self.scale, self.ratio)
        image.draft("RGB", (SIDE * width // w, SIDE * height // h))
        x, y = image.width / width, image.height / height
        box = (left * x, top * y, (left + w) * x, (top + h) * y)
        return image.convert("RGB").resize((SIDE, SIDE), Image.Resampling.BILINEAR, box=box)


def images(reader, as_bytes):
    to_float = [transforms.PILToTensor()] if as_bytes else [transforms.ToTensor(), NORMALIZE]
    to_tensor = [transforms.RandomHorizontalFlip(), *to_float]
    if reader == "draft":
        return datasets.ImageFolder(JOB["train"], transforms.Compose([DraftCrop(SIDE), *to_tensor]), loader=Image.open)
    if reader == "torchvision.io":
        steps = [
            transforms.RandomResizedCrop(SIDE, antialias=True),
            transforms.RandomHorizontalFlip(),
            *([] if as_bytes else [transforms.ConvertImageDtype(torch.float32), NORMALIZE]),
        ]
        return datasets.ImageFolder(JOB["train"], transforms.Compose(steps), loader=io.read_image)
    return datasets.ImageFolder(JOB["train"], transforms.Compose([transforms.RandomResizedCrop(SIDE), *to_tensor]))


def resnet(classes):
    return (models.resnet50 if DEVICE.type == "cuda" else models.resnet18)(num_classes=classes)


def build(workers=None, reader="PIL", crew=None, precision="float32", fused=None, channels_last=False, as_bytes=False):
    # Threads that compute, and workers.
    threads, workers = crew or (None, workers)
    more = dict(persistent_workers=True, worker_init_fn=nice_worker) if TUNED and workers else {}
    data = images(reader, as_bytes)
    pinned = DEVICE.type == "cuda"
    loader = DataLoader(
        data, batch_size=BATCH, shuffle=True, drop_last=True, num_workers=workers, pin_memory=pinned, **more
    )
    model = initial(lambda: resnet(len(data.classes))).to(DEVICE)
    if channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)
    forward = torch.compile(model) if COMPILED else model
    loss_of = nn.CrossEntropyLoss()
    precision = Precision(precision)

    def train(batches):
        torch.set_num_threads(threads or JOB["threads"])
        model.train()
        total, inputs = torch.zeros((), device=DEVICE), 0
        for x, y in batches:
            x, y = x.to(DEVICE, non_blocking=TUNED), y.to(DEVICE, non_blocking=TUNED)
            if as_bytes:
                x = NORMALIZE(x / 255)
            if channels_last:
                x = x.to(memory_format=torch.channels_last)
            optimizer.zero_grad()
            with precision.autocast():
                loss = loss_of(forward(x), y)
            precision.step(loss, optimizer)
            total += loss.detach() * len(y)
            inputs += len(y)
        return inputs, total.item() / max(inputs, 1)

    def accuracy():
        if not JOB["test"]:
            return None
        model.eval()
        whole = [transforms.Resize(SIDE * 8 // 7), transforms.CenterCrop(SIDE), transforms.ToTensor()]
        test = datasets.ImageFolder(JOB["test"], transforms.Compose([*whole, NORMALIZE]))
        right = 0
        with torch.no_grad():
            for x, y in DataLoader(test, batch_size=BATCH):
                right += (model(x.to(DEVICE)).argmax(-1) == y.to(DEVICE)).sum().item()
        return right / len(test)

    parts = lambda: (loader for _ in range(JOB["length"]))
    return types.SimpleNamespace(loader=loader, read_ahead=2 * workers, train=train, accuracy=accuracy, parts=parts)


if __name__ == "__main__":
    most = JOB["threads"]
    options = {}
    if TUNED:
        half = max(1, most // 2)
        options = {"reader": "draft", "crew": (half, most), "fused": True, "channels_last": True}
        tries = {
            "crew": [(threads, workers) for threads in sorted({1, half, most}) for workers in sorted({half, most})],
            "reader": ["draft", "torchvision.io"],
            "precision": PRECISIONS,
            "channels_last": [True, False],
            "fused": FUSED,
        }
        if DEVICE.type == "cuda":
            # A quarter of the bytes is copied to the device, as ours does.
            options["as_bytes"], tries["as_bytes"] = True, [True, False]
        options, text = tuned(options, tries, build)
    else:
        tried = usual_workers()
        options["workers"] = best(tried, build)
        text = best_in_words(options["workers"], tried, "worker")
    serve(lambda: build(**options), [text], options)
