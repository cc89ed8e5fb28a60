"""One rank of the cases in ddp.py: `python ddp_rank.py JOB OUT.pt`, with a launcher's variables."""

import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.nn.parallel.distributed import _MixedPrecision

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
# The steps after which parameters are compared; comparing after the others would add nothing.
KEPT = (0, 1, 2, 3, 4, 9, 19, 29, 39, 49)


class Mlp(torch.nn.Module):
    def __init__(self):
        super().__init__()
        # One by one, because a ParameterDict made from a dict sorts it, and ranks have to agree on the order.
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


class NoStream:
    """A CPU has no streams: PyTorch's mixed precision makes some, and waits for them."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def wait(self, stream=None):
        pass

    def record(self):
        pass

    def wait_stream(self, _):
        pass


# The dtypes of parameters, and of sums over ranks.
MIXED = {
    "bfloat16": (torch.bfloat16, torch.bfloat16),
    "bfloat16_float32": (torch.bfloat16, torch.float32),
    "float16": (torch.float16, torch.float16),
    "float16_float32": (torch.float16, torch.float32),
}


class Linears(torch.nn.Module):
    """The same as `Mlp`. PyTorch's mixed precision looks after parameters only of modules that are called."""

    def __init__(self):
        super().__init__()
        params = parameters()
        self.layers = torch.nn.ModuleList()
        for layer in range(3):
            outputs, inputs = params[f"weight.{layer}"].shape
            self.layers.append(torch.nn.Linear(inputs, outputs))
        self.load_state_dict({f"layers.{name[-1]}.{name[:-2]}": param for name, param in params.items()})

    def forward(self, x):
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return self.layers[-1](x)


def train_mixed():
    torch.Stream = torch.Event = NoStream
    torch.accelerator.current_stream = NoStream
    results = {}
    for way, (param_dtype, reduce_dtype) in MIXED.items():
        model = Linears()
        precision = _MixedPrecision(param_dtype=param_dtype, reduce_dtype=reduce_dtype)
        ddp = DistributedDataParallel(model, mixed_precision=precision, bucket_cap_mb=1 / 2048)
        # In the first pass PyTorch 2.11 averages memory that nothing has written: the views of its buckets are of other
        # memory, in float32, until it makes the buckets anew for the second pass.
        ddp(batches(dist.get_rank())[0][0]).sum().backward()
        model.zero_grad(set_to_none=True)
        for step, batch in enumerate(batches(dist.get_rank())):
            x, y = batch
            (ddp(x).float() - y).square().mean().backward()
            with torch.no_grad():
                for name, param in model.named_parameters():
                    assert param.dtype == param.grad.dtype == torch.float32
                    param.sub_(param.grad * 0.25)
                    if step in KEPT:
                        _, layer, kind = name.split(".")
                        results[f"{way}.{step}.{kind}.{layer}"] = param.detach().clone()
                    param.grad = None
    assert all(tensor.isfinite().all() for tensor in results.values()), "a parameter is not finite"
    return results


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
    assert all(tensor.isfinite().all() for tensor in results.values()), "a parameter is not finite"
    return results


def train_more():
    """Trains on three of four ranks, then on all four."""
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
    """Each rank's inputs: small enough that no reduction overflows its dtype, and not all 0."""
    generator = torch.Generator().manual_seed(7 + rank)
    given = {"float": torch.randn(2, 6, generator=generator)}
    given["half"] = torch.randn(2, 6, generator=generator).half()
    given["int"] = torch.randint(-9, 9, (2, 6), generator=generator)
    given["double"] = torch.randn(2, 6, generator=generator, dtype=torch.float64)
    given["bfloat16"] = torch.randn(2, 6, generator=generator).bfloat16()
    given["int32"] = torch.randint(-9, 9, (2, 6), generator=generator, dtype=torch.int32)
    given["int8"] = torch.randint(-9, 9, (2, 6), generator=generator, dtype=torch.int8)
    given["uint8"] = torch.randint(0, 9, (2, 6), generator=generator, dtype=torch.uint8)
    given["bool"] = torch.randint(0, 2, (2, 6), generator=generator).bool()
    return given


def ops_of(tensor):
    """The reductions that Gloo has for a dtype. No sum of bools: Gloo's sum of two `True` is the invalid byte 2."""
    ops = ["product", "min", "max"] + ([] if tensor.dtype == torch.bool else ["sum"])
    return ops + (["avg"] if tensor.dtype.is_floating_point else ["band", "bor", "bxor"])


def reductions(given, op):
    """This rank's result of each reducing collective, by the collective's name."""
    rank, group, results = dist.get_rank(), dist.group.WORLD, {}
    results["all_reduce"] = given.clone()
    dist.all_reduce(results["all_reduce"], op)
    several = [given.clone(), given[0].clone()]
    dist.all_reduce_coalesced(several, op)
    results.update({f"all_reduce_coalesced.{place}": tensor for place, tensor in enumerate(several)})
    reduced = given.clone()
    dist.reduce(reduced, 1, op)
    if rank == 1:
        results["reduce"] = reduced
    results["reduce_scatter"] = torch.empty_like(given[0])
    dist.reduce_scatter(results["reduce_scatter"], list(given.unbind()), op)
    results["reduce_scatter_into"] = given.new_empty(1, 6)
    dist.reduce_scatter_tensor(results["reduce_scatter_into"], given, op)
    parts = [given.new_empty(1, 6), given.new_empty(3)]
    options = dist.ReduceScatterOptions()
    options.reduceOp = op
    group.reduce_scatter_tensor_coalesced(parts, [given, given[1].clone()], options).wait()
    results.update({f"reduce_scatter_into_coalesced.{place}": part for place, part in enumerate(parts)})
    return results


def copies(given):
    rank, group, results = dist.get_rank(), dist.group.WORLD, {}
    results["broadcast"] = given.clone()
    dist.broadcast(results["broadcast"], 1)
    gathered = [torch.empty_like(given) for _ in range(2)]
    dist.all_gather(gathered, given)
    results["all_gather"] = torch.stack(gathered)
    results["all_gather_into"] = given.new_empty(4, 6)
    dist.all_gather_into_tensor(results["all_gather_into"], given)
    two = [given, given[0].clone()]
    lists = [[torch.empty_like(tensor) for tensor in two] for _ in range(2)]
    dist.all_gather_coalesced(lists, two)
    for source, tensors in enumerate(lists):
        results.update({f"all_gather_coalesced.{source}.{place}": tensor for place, tensor in enumerate(tensors)})
    wholes = [given.new_empty(4, 6), given.new_empty(12)]
    group.allgather_into_tensor_coalesced(wholes, two).wait()
    results.update({f"all_gather_into_coalesced.{place}": whole for place, whole in enumerate(wholes)})
    gathered = [torch.empty_like(given) for _ in range(2)] if rank == 0 else None
    dist.gather(given, gathered, dst=0)
    if rank == 0:
        results["gather"] = torch.stack(gathered)
    results["scatter"] = given.new_empty(6)
    dist.scatter(results["scatter"], list(given.unbind()) if rank == 0 else None, src=0)
    return results


def between_two(given):
    rank, results = dist.get_rank(), {}
    other = 1 - rank
    swapped = torch.empty_like(given)
    dist.all_to_all_single(swapped, given)
    # PyTorch supports all_to_all with lists only over NCCL; by definition it equals this form, row by row.
    results["all_to_all_single"] = results["all_to_all"] = swapped
    sent = dist.isend(given, other, tag=7)
    results["recv"] = torch.empty_like(given)
    dist.recv(results["recv"], other, tag=7)
    sent.wait()
    if rank == 1:
        dist.send(given, 0, tag=8)
    else:
        results["recv_from_anyone"] = torch.empty_like(given)
        assert dist.recv(results["recv_from_anyone"], tag=8) == 1
    return results


def collectives():
    results = {}
    for kind, given in inputs(dist.get_rank()).items():
        for op in ops_of(given):
            of_op = reductions(given, getattr(dist.ReduceOp, op.upper()))
            results.update({f"{kind}.{name}.{op}": tensor for name, tensor in of_op.items()})
        found = copies(given) | between_two(given)
        results.update({f"{kind}.{name}": tensor for name, tensor in found.items()})
    return results


if __name__ == "__main__":
    job, out = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    jobs = (train, train_more, train_mixed, one_step, collectives)
    results = {run.__name__: run for run in jobs}[job]()
    torch.save(results, out)
    dist.barrier()
    dist.destroy_process_group()
