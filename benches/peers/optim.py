"""PyTorch's side of `versus optim`. Answers each line `NAME STEPS` with the seconds that those steps took."""

import json
import sys
import time

import torch


def clip(params, max_norm, shrink):
    """A step that clips gradients. With `shrink` below 1, the maximum norm falls with each call, so it always clips."""
    calls = 0

    def step():
        nonlocal calls
        calls += 1
        torch.nn.utils.clip_grad_norm_(params, max_norm * shrink**calls, foreach=True)

    return step


def main():
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    params = [torch.randn(shape, requires_grad=True) for shape in options["shapes"]]
    for param in params:
        param.grad = torch.randn_like(param)
    steps = {
        "fused": torch.optim.AdamW(params, lr=1e-3, fused=True).step,
        "foreach": torch.optim.AdamW(params, lr=1e-3, foreach=True).step,
        "clip": clip(params, 1e3, 0.95),
        "leave": clip(params, 1e9, 1.0),
    }
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
