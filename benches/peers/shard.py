"""A PyTorch rank in `versus shard`. Answers each line `step-WAY-float STEPS` with seconds: ZeroRedundancyOptimizer or
fully_shard."""

import os
import sys
import time

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

BATCH = 32


def mlp():
    """10.0 million parameters."""
    widths = [784, 2048, 2048, 2048, 10]
    layers = [
        torch.nn.Sequential(torch.nn.Linear(inputs, outputs), torch.nn.ReLU())
        for inputs, outputs in zip(widths, widths[1:])
    ]
    return torch.nn.Sequential(*layers)


class Training:
    """A model, its batch and its optimizer."""

    def __init__(self, way):
        model = mlp()
        if way == "zero1":
            self.model = DistributedDataParallel(model, gradient_as_bucket_view=True)
            params = model.parameters()
            self.opt = ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=1e-3, fused=True)
        else:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            for layer in model:
                fully_shard(layer, mesh=mesh)
            self.model = fully_shard(model, mesh=mesh)
            self.opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
        self.inputs = torch.randn(BATCH, 784)
        for _ in range(3):
            self.step()

    def step(self):
        self.model(self.inputs).square().mean().backward()
        self.opt.step()
        self.opt.zero_grad()

    def seconds(self, steps):
        started = time.perf_counter()
        for _ in range(steps):
            self.step()
        return time.perf_counter() - started


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print(torch.__version__, flush=True)
    trainings = {}
    for line in sys.stdin:
        name, steps = line.split()
        _, way, _ = name.split("-")
        if way not in trainings:
            trainings[way] = Training(way)
        dist.barrier()
        print(trainings[way].seconds(int(steps)), flush=True)
    # Threads that a mesh's groups leave behind sometimes abort Python at its end.
    os._exit(0)


if __name__ == "__main__":
    main()
