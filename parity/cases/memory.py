"""Activation checkpointing: gradients to the bit, and how often each part runs."""

import functools

import torch
from harness import case
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

again = functools.partial(checkpoint, use_reentrant=False)


class Counted:
    """Counts the calls of a function."""

    def __init__(self, function):
        self.function, self.calls = function, 0

    def __call__(self, *args):
        self.calls += 1
        return self.function(*args)


@case
def activation_checkpointing(t):
    """Plain, with dropout, nested, sequential, under autocast, differentiated twice, and selective."""
    weights = [torch.randn(8, 8) * 0.4 for _ in range(5)]
    for index, weight in enumerate(weights):
        t.give(f"weight.{index}", weight)
        weight.requires_grad_()
    x = t.give("x", torch.randn(4, 8)).requires_grad_()

    def layer(weight, x):
        return torch.nn.functional.gelu(x @ weight).sin()

    def expect(name, loss, *functions):
        for index, grad in enumerate(torch.autograd.grad(loss, [x, *weights], allow_unused=True)):
            if grad is not None:
                t.expect(f"{name}.{index}", grad)
        for index, function in enumerate(functions):
            t.expect(f"{name}.calls.{index}", torch.tensor(function.calls))

    counted = [Counted(functools.partial(layer, weight)) for weight in weights]
    y = x
    for function in counted:
        y = again(function, y)
    expect("layers", y.square().sum(), *counted)

    def dropped(weight, x):
        return torch.nn.functional.dropout(layer(weight, x), 0.3).sin()

    torch.manual_seed(7)
    y = x
    for weight in weights[:3]:
        y = again(functools.partial(dropped, weight), y)
    expect("dropout", y.square().sum())
    t.expect("dropout.next", torch.rand(4))

    inner = Counted(functools.partial(layer, weights[1]))
    middle = Counted(lambda x: again(inner, layer(weights[0], x)).sin())
    outer = Counted(lambda x: again(middle, x * 2.0).exp())
    expect("nested", again(outer, x).sum(), outer, middle, inner)

    counted = [Counted(functools.partial(layer, weight)) for weight in weights]
    y = checkpoint_sequential(counted, 2, x, use_reentrant=False)
    expect("sequential", y.square().sum(), *counted)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = again(functools.partial(layer, weights[0]), x)
    expect("autocast", y.float().square().sum())

    y = again(functools.partial(layer, weights[0]), x)
    (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    expect("second", first.square().sum())

    products = [torch.ops.aten.mm.default]
    context = functools.partial(create_selective_checkpoint_contexts, products)
    y = x
    for weight in weights[:2]:
        y = again(functools.partial(layer, weight), y, context_fn=context)
    expect("selective", y.square().sum())

    inner = Counted(functools.partial(layer, weights[0]))

    def with_backward(x):
        y = inner(x)
        (dx,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
        return (y * dx).cos()

    expect("backward_within", again(with_backward, x).sum(), inner)


@case
def saved_tensors_hooks(t):
    """What is packed, in which order, by which of two hooks; and gradients of what comes back, also twice."""
    weights = [torch.randn(8, 8) * 0.4 for _ in range(3)]
    for index, weight in enumerate(weights):
        t.give(f"weight.{index}", weight)
        weight.requires_grad_()
    x = t.give("x", torch.randn(4, 8)).requires_grad_()
    packed, unpacked = [], []

    def hooks(name, dtype):
        def pack(tensor):
            packed.append([name, *tensor.shape])
            return tensor.to(dtype)

        def unpack(tensor):
            unpacked.append([name, *tensor.shape])
            return tensor.float()

        return torch.autograd.graph.saved_tensors_hooks(pack, unpack)

    def expect(name, loss):
        for index, grad in enumerate(torch.autograd.grad(loss, [x, *weights], retain_graph=True)):
            t.expect(f"{name}.{index}", grad)
        t.expect(f"{name}.packed", torch.tensor(packed))
        t.expect(f"{name}.unpacked", torch.tensor(unpacked))

    with hooks(0, torch.bfloat16):
        y = torch.nn.functional.gelu(x @ weights[0]).sin()
        with hooks(1, torch.float16):
            y = (y @ weights[1]).tanh() * y
        y = y @ weights[2]
    loss = torch.nn.functional.softmax(y.exp(), 1).square().sum()
    expect("once", loss)
    expect("twice", loss)

    with hooks(2, torch.float32):
        dropped = torch.nn.functional.dropout(x, 0.0).relu() @ weights[0]
        pooled = torch.nn.functional.layer_norm(dropped, [8]).sigmoid()
    expect("others", (pooled @ weights[1] @ weights[2]).sum())
