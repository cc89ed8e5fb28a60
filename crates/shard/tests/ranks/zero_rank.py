"""One rank of PyTorch's ZeroRedundancyOptimizer over Gloo: `python zero_rank.py FOLDER`, with a launcher's variables.

Rank 0 writes, for each optimizer, each step's parameters as float32 numbers to FOLDER/NAME, each rank its losses to
FOLDER/NAME.losses.RANK, and rank 0 the owner of each parameter to FOLDER/NAME.owners. `beside_python.rs` does the same.
"""

import array
import pathlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

SHAPES = [(24, 10), (24,), (16, 24), (16,), (3, 16), (3,)]
STEPS = 20
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3, "fused": True}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "fused": True}),
}


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.params = torch.nn.ParameterList([torch.randn(shape) * 0.3 for shape in SHAPES])

    def forward(self, x):
        for layer in range(3):
            x = torch.nn.functional.linear(x, self.params[2 * layer], self.params[2 * layer + 1])
            x = torch.tanh(x) if layer < 2 else x
        return x


def write(path, numbers):
    with path.open("ab") as file:
        array.array("f", numbers).tofile(file)


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    for name, (kind, options) in OPTIMIZERS.items():
        model = Mlp()
        ddp = DistributedDataParallel(model)
        opt = ZeroRedundancyOptimizer(model.parameters(), kind, **options)
        for step in range(STEPS):
            torch.manual_seed(1000 + 10 * step + rank)
            x, y = torch.randn(8, 10), torch.randn(8, 3)
            loss = (ddp(x) - y).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            write(folder / f"{name}.losses.{rank}", [loss.item()])
            if rank == 0:
                write(folder / name, torch.cat([param.detach().flatten() for param in model.params]).tolist())
        if rank == 0:
            owners = [opt._param_to_rank[param] for param in model.params]
            (folder / f"{name}.owners").write_text(" ".join(map(str, owners)))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
