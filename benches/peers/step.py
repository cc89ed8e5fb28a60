"""PyTorch's side of `versus step`. Answers each line `NAME STEPS` with the seconds that those steps took."""

import json
import sys
import time

import torch


def mlp(fused):
    """A training step of the MLP 784-128-128-10 with SGD and batches of 16."""
    model = torch.nn.Sequential(
        torch.nn.Linear(784, 128), torch.nn.ReLU(), torch.nn.Linear(128, 128), torch.nn.ReLU(),
        torch.nn.Linear(128, 10))
    opt = torch.optim.SGD(model.parameters(), lr=0.01, fused=fused)
    loss_fn = torch.nn.CrossEntropyLoss()
    x, y = torch.randn(16, 784), torch.randint(0, 10, (16,))

    def step():
        opt.zero_grad()
        loss_fn(model(x), y).backward()
        opt.step()

    return step


def adamw(shapes, **options):
    """An AdamW step over parameters of the given shapes, with fixed gradients."""
    params = [torch.randn(shape, requires_grad=True) for shape in shapes]
    for param in params:
        param.grad = torch.randn_like(param)
    return torch.optim.AdamW(params, lr=1e-3, **options).step


def main():
    torch.set_num_threads(int(sys.argv[1]))
    shapes = json.loads(sys.argv[2])
    steps = {
        "mlp_default": mlp(None),
        "mlp_fused": mlp(True),
        "adamw_fused": adamw(shapes, fused=True),
        "adamw_foreach": adamw(shapes, foreach=True),
    }
    for step in steps.values():
        for _ in range(3):
            step()
    print(torch.__version__, flush=True)
    for line in sys.stdin:
        name, count = line.split()
        step = steps[name]
        started = time.perf_counter()
        for _ in range(int(count)):
            step()
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    main()
