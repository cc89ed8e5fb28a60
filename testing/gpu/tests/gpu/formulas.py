"""Updates of optimizers as Inductor compiles them for a GPU: python formulas.py FORMULAS, on a stand-in for CUDA's runtime.

Nothing runs a kernel there. So each of Triton's is read as Python here, over copies of its tensors in the host's memory, and
the update is compared with the same formula uncompiled. Prints `right NAME` for each.
"""

import sys
import types

import torch
from torch._inductor import config
from torch._inductor.runtime import triton_heuristics

BLOCK = 1024
SHAPES = [(64, 48), (48,), (7, 3, 3, 3), ()]


class Pointer:
    """A tensor's memory, or a place in it."""

    def __init__(self, tensor, at=None):
        self.tensor, self.at = tensor, at

    def __add__(self, at):
        return Pointer(self.tensor, torch.as_tensor(at))


def load(pointer, mask=None, *_, **__):
    count = pointer.tensor.numel()
    return pointer.tensor.flatten()[pointer.at.clamp(0, count - 1)]


def store(pointer, value, mask=None):
    at = pointer.at.reshape(-1)
    keep = at < pointer.tensor.numel() if mask is None else mask.expand(at.shape)
    value = value.expand(at.shape)[keep].to(pointer.tensor.dtype)
    pointer.tensor.view(-1)[at[keep]] = value


def language(pid):
    return types.SimpleNamespace(
        load=load, store=store, program_id=lambda _: pid, cdiv=lambda a, b: -(-a // b), arange=torch.arange,
        full=lambda shape, value, dtype: torch.full(shape, value, dtype=dtype), where=torch.where,
        broadcast_to=lambda value, shape: value.expand(shape), sqrt_rn=torch.sqrt, constexpr=int, int1=torch.bool,
        float32=torch.float32, float64=torch.float64, bfloat16=torch.bfloat16, int32=torch.int32, int64=torch.int64)


MATH = types.SimpleNamespace(pow=torch.pow, sqrt=torch.sqrt)
HELPERS = types.SimpleNamespace(maximum=torch.maximum)
READ = []


def run(kernel, *args, **_):
    """In place of a launch: all blocks of the kernel, one after the other."""
    function = kernel.fn.fn
    READ.append(function.__name__)
    copies = {id(arg): arg.cpu() for arg in args if isinstance(arg, torch.Tensor) and arg.is_cuda}
    values = [Pointer(copies[id(arg)]) if id(arg) in copies
              else torch.tensor(arg, dtype=torch.float64) if isinstance(arg, float)
              else arg for arg in args]
    grid = kernel.inductor_meta.get("combo_grid_meta")
    sizes = [grid[f"xnumel_{i}"] for i in range(grid["num_kernels"])] if grid else [args[-1]]
    more = {} if grid else {"XBLOCK": BLOCK}
    for pid in range(sum(-(-size // BLOCK) for size in sizes)):
        own = {**function.__globals__, "tl": language(pid), "libdevice": MATH, "tl_math": MATH, "triton_helpers": HELPERS}
        types.FunctionType(function.__code__, own)(*values, **more)
    for arg in args:
        if id(arg) in copies:
            arg.copy_(copies[id(arg)])


def tensors(dtype):
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def cases(adam, sgd, lerp):
    """Names, functions of lists of tensors and numbers, and dtypes."""
    def decayed(p, g, m, v, x, e, steps, lr, beta):
        adam(p, g, m, v, [], steps, lr, beta, 0.99, 0.1, 1e-8, decoupled=True, unfit=None)
        lerp(e, p, 1 - beta, unfit=None)

    def l2_amsgrad(p, g, m, v, x, e, steps, lr, beta):
        adam(p, g, m, v, x, steps, lr, beta, 0.99, 0.1, 1e-8, True, True, decoupled=False, unfit=None)

    def momentum(p, g, m, v, x, e, steps, lr, beta):
        sgd(p, g, m, 0.1, beta, lr, 0.1, False, False, False, unfit=None)

    def nesterov(p, g, m, v, x, e, steps, lr, beta):
        sgd(p, g, m, 0.1, beta, lr, 0.0, True, True, False, unfit=None)

    def first(p, g, m, v, x, e, steps, lr, beta):
        sgd(p, g, m, 0.1, beta, lr, 0.0, False, False, True, unfit=None)

    for update in [decayed, l2_amsgrad, momentum, nesterov, first]:
        for dtype in [torch.float32, torch.bfloat16]:
            yield f"{update.__name__} {dtype}", update, dtype


def main():
    scope = {}
    exec(open(sys.argv[1]).read(), scope)
    # Processes that compile would keep the kernels' Python to themselves.
    config.compile_threads = 1
    triton_heuristics.CachingAutotuner.run = run
    for name, update, dtype in cases(scope["adam"], scope["sgd"], scope["lerp"]):
        torch.manual_seed(1)
        lists = [tensors(dtype) for _ in range(6)]
        lists[3], lists[4] = ([it.abs() for it in lists[place]] for place in (3, 4))
        lists.append([torch.tensor(3.0) for _ in SHAPES])
        numbers = [number(0.01), number(0.9)]
        on_device = [[it.cuda() for it in one] for one in lists]
        before = [it.clone() for it in lists[0]]
        READ.clear()
        with torch.no_grad():
            torch.compile(update, fullgraph=True)(*on_device, *numbers)
            update(*lists, *numbers)
        if not any("triton_for_fused" in kernel for kernel in READ):
            sys.exit(f"{name}: no kernel of lists among {READ}")
        moved = max((new - old).abs().max().item() for new, old in zip(lists[0], before))
        for place, (found, expected) in enumerate(zip(sum(on_device, []), sum(lists, []))):
            apart = (found.cpu() - expected).abs().max().item()
            # Of 16 bits, a number may be rounded to the next one.
            close = apart <= 1e-5 * max(1.0, expected.abs().max().item()) if dtype == torch.float32 else apart <= 0.02
            if not close or moved == 0:
                sys.exit(f"{name}: tensor {place} is {apart} apart, and weights have moved by {moved}")
        print("right", name, flush=True)


if __name__ == "__main__":
    main()
