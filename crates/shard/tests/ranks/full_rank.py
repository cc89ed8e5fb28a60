"""One rank of PyTorch's fully_shard over Gloo: `python full_rank.py FOLDER`, with a launcher's variables.

Each rank writes its losses as float32 numbers to FOLDER/NAME.losses.RANK, and rank 0 the whole parameters after each step
to FOLDER/NAME. `full_beside_python.rs` does the same.
"""

import array
import os
import pathlib
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

SHAPES = [(24, 10), (24,), (15, 24), (15,), (3, 15), (3,)]
STEPS = 20
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 1e-3}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}


class Layer(torch.nn.Module):
    def __init__(self, weight, bias):
        super().__init__()
        self.weight, self.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)

    def forward(self, x):
        return torch.nn.functional.linear(x, self.weight, self.bias)


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        params = [torch.randn(shape) * 0.3 for shape in SHAPES]
        self.layers = torch.nn.ModuleList([Layer(params[2 * at], params[2 * at + 1]) for at in range(3)])

    def forward(self, x):
        for layer in self.layers[:2]:
            x = torch.tanh(layer(x))
        return self.layers[2](x)


def write(path, numbers):
    with path.open("ab") as file:
        array.array("f", numbers).tofile(file)


def main(folder):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for name, (kind, options) in OPTIMIZERS.items():
        model = Mlp()
        for layer in model.layers[:2]:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        opt = kind(model.parameters(), **options)
        for step in range(STEPS):
            torch.manual_seed(1000 + 10 * step + rank)
            x, y = torch.randn(8, 10), torch.randn(8, 3)
            loss = (model(x) - y).square().mean()
            loss.backward()
            opt.step()
            opt.zero_grad()
            write(folder / f"{name}.losses.{rank}", [loss.item()])
            whole = torch.cat([param.full_tensor().detach().flatten() for param in model.parameters()])
            if rank == 0:
                write(folder / name, whole.tolist())
    # Not by destroy_process_group: threads that a mesh's groups leave behind sometimes abort Python at its end. Rank 0 has
    # the store, and goes last.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"done/{rank}", "1")
    if rank == 0:
        store.wait([f"done/{other}" for other in range(dist.get_world_size())])
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(pathlib.Path(sys.argv[1]))
