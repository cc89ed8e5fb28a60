"""One rank of the cases in ddp.py: `python ddp_rank.py JOB OUT.pt`, told by a launcher's variables which one it is."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

# Small buckets, so that several are under way at once; 1 / 2048 MiB holds 128 float32 gradients.
WAYS = {
    "plain": {},
    "small_buckets": {"bucket_cap_mb": 1 / 2048},
    "views": {"bucket_cap_mb": 1 / 2048, "gradient_as_bucket_view": True},
    "static": {"static_graph": True},
    "unused": {"find_unused_parameters": True},
}
SHAPES = {"weight.0": (24, 10), "bias.0": (24,), "weight.1": (16, 24), "bias.1": (16,), "weight.2": (3, 16), "bias.2": (3,)}
STEPS = 50
# The steps behind which parameters are compared; the others would only say the same at more length.
KEPT = (0, 1, 2, 3, 4, 9, 19, 29, 39, 49)


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        # One by one, because a ParameterDict sorts what it is made from, and ranks have to agree on the order.
        self.params = torch.nn.ParameterDict()
        for name, param in parameters().items():
            self.params[name.replace(".", "_")] = torch.nn.Parameter(param)

    def forward(self, x):
        for layer in range(3):
            x = torch.nn.functional.linear(x, self.params[f"weight_{layer}"], self.params[f"bias_{layer}"])
            x = torch.tanh(x) if layer < 2 else x
        return x


def parameters():
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in SHAPES.items()}


def batches(rank):
    generator = torch.Generator().manual_seed(100 + rank)
    return [(torch.randn(8, 10, generator=generator), torch.randn(8, 3, generator=generator)) for _ in range(STEPS)]


def backward(ddp, batch):
    x, y = batch
    (ddp(x) - y).square().mean().backward()


def train(group=None):
    rank, results = dist.get_rank(), {}
    for way, options in WAYS.items():
        model = Mlp()
        ddp = DistributedDataParallel(model, process_group=group, **options)
        for step, batch in enumerate(batches(rank)):
            backward(ddp, batch)
            with torch.no_grad():
                for name, param in model.params.items():
                    param.sub_(param.grad * 0.25)
                    param.grad.zero_()
                    if step in KEPT:
                        results[f"{way}.{step}.{name.replace('_', '.')}"] = param.detach().clone()
    assert all(tensor.isfinite().all() for tensor in results.values()), "the training has left the finite numbers"
    return results


def train_more():
    """Three ranks of four, then all four."""
    results = {}
    for size in (3, 4):
        group = dist.new_group(range(size))
        if dist.get_rank() < size:
            results.update({f"{size}.{name}": tensor for name, tensor in train(group).items()})
    return results


def one_step():
    model = Mlp()
    ddp = DistributedDataParallel(model)
    results = {}
    for step, batch in enumerate(batches(dist.get_rank())[:5]):
        for param in model.params.values():
            param.grad = None
        backward(ddp, batch)
        for name, param in model.params.items():
            results[f"{step}.{name.replace('_', '.')}"] = param.grad.clone()
    return results


def inputs(rank):
    generator = torch.Generator().manual_seed(7 + rank)
    return {
        "float": torch.randn(2, 6, generator=generator),
        "half": torch.randn(2, 6, generator=generator).half(),
        "int": torch.randint(-9, 9, (2, 6), generator=generator),
    }


def collectives():
    rank, results, ops = dist.get_rank(), {}, dist.ReduceOp
    for kind, given in inputs(rank).items():
        for name, op in (("sum", ops.SUM), ("product", ops.PRODUCT), ("min", ops.MIN), ("max", ops.MAX)):
            tensor = given.clone()
            dist.all_reduce(tensor, op)
            results[f"{kind}.all_reduce.{name}"] = tensor
        tensor = given.clone()
        dist.broadcast(tensor, 1)
        results[f"{kind}.broadcast"] = tensor
        gathered = [torch.empty_like(given) for _ in range(2)]
        dist.all_gather(gathered, given)
        results[f"{kind}.all_gather"] = torch.stack(gathered)
        whole = torch.empty(4, 6, dtype=given.dtype)
        dist.all_gather_into_tensor(whole, given)
        results[f"{kind}.all_gather_into"] = whole
        part = torch.empty(1, 6, dtype=given.dtype)
        dist.reduce_scatter_tensor(part, given)
        results[f"{kind}.reduce_scatter_into"] = part
        part = torch.empty(6, dtype=given.dtype)
        dist.scatter(part, list(given.unbind()) if rank == 0 else None, src=0)
        results[f"{kind}.scatter"] = part
        swapped = torch.empty_like(given)
        dist.all_to_all_single(swapped, given)
        results[f"{kind}.all_to_all_single"] = swapped
    return results


if __name__ == "__main__":
    job, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    results = {"train": train, "train_more": train_more, "one_step": one_step, "collectives": collectives}[job]()
    torch.save(results, out)
    dist.barrier()
    dist.destroy_process_group()
