"""PyTorch's side of `versus checkpoint`: answers each line `save 1` or `load 1` with the seconds that it took."""

import json
import os
import sys
import time

import torch


def main():
    options = json.loads(sys.argv[1])
    path = options["path"]
    params = [torch.randn(shape, requires_grad=True) for shape in options["shapes"]]
    optimizer = torch.optim.AdamW(params, fused=True)
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
    optimizer.zero_grad()

    def state():
        return {"model": {str(at): param.detach() for at, param in enumerate(params)}, "optimizer": optimizer.state_dict()}

    def save():
        with open(path + ".aside", "wb") as file:
            torch.save(state(), file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(path + ".aside", path)

    def load():
        saved = torch.load(path, weights_only=True)
        with torch.no_grad():
            for at, param in enumerate(params):
                param.copy_(saved["model"][str(at)])
        optimizer.load_state_dict(saved["optimizer"])

    print(torch.__version__, flush=True)
    for line in sys.stdin:
        name, count = line.split()
        started = time.perf_counter()
        for _ in range(int(count)):
            {"save": save, "load": load}[name]()
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    main()
