"""PyTorch's side of `versus compile`. Answers each line `MODEL-WAY STEPS` with the seconds that those steps took: by the way
`eager` or `compiled`, both with fused AdamW. Its arguments: threads, models, device."""

import sys
import time

import torch
import torchvision
from torch import nn
from torch.nn import functional


def mlp():
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 32, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Dropout(0.1), nn.Linear(800, 10))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(128)
        self.attention = nn.Linear(128, 384)
        self.project = nn.Linear(128, 128)
        self.norm2 = nn.LayerNorm(128)
        self.widen = nn.Linear(128, 512)
        self.narrow = nn.Linear(512, 128)

    def forward(self, x):
        q, k, v = (part.view(-1, 64, 4, 32).transpose(1, 2) for part in self.attention(self.norm1(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(-1, 64, 128))
        return x + self.narrow(functional.gelu(self.widen(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(96, 128)
        self.places = nn.Embedding(64, 128)
        self.blocks = nn.ModuleList([Block() for _ in range(4)])
        self.norm = nn.LayerNorm(128)
        self.head = nn.Linear(128, 96, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(64, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


MODELS = {
    "mlp": (mlp, lambda: (torch.randn(16, 784), torch.randint(10, (16,)))),
    "cnn": (cnn, lambda: (torch.randn(128, 1, 28, 28), torch.randint(10, (128,)))),
    "gpt": (Gpt, lambda: (torch.randint(96, (8, 64)), torch.randint(96, (512,)))),
    "resnet18": (torchvision.models.resnet18, lambda: (torch.randn(16, 3, 64, 64), torch.randint(1000, (16,)))),
}


def step_of(name, way, device):
    make, batch = MODELS[name]
    model = make().to(device)
    x, y = (part.to(device) for part in batch())
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    run = torch.compile(model) if way == "compiled" else model

    def step():
        functional.cross_entropy(run(x), y).backward()
        opt.step()
        opt.zero_grad()

    return step


def main():
    torch.set_num_threads(int(sys.argv[1]))
    names, device = sys.argv[2].split(","), torch.device(sys.argv[3])
    steps = {f"{name}-{way}": step_of(name, way, device) for name in names for way in ("eager", "compiled")}

    def now():
        if device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    for step in steps.values():
        for _ in range(3):
            step()
    print(torch.__version__, flush=True)
    for line in sys.stdin:
        name, count = line.split()
        step = steps[name]
        started = now()
        for _ in range(int(count)):
            step()
        print(now() - started, flush=True)


if __name__ == "__main__":
    main()
