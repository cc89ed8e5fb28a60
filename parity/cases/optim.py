"""Fused optimizers over 1,000 steps."""

import torch
from harness import case

SHAPES = ((7, 5), (33,), (1,), (4, 3, 2))
ADAMW = [
    {"lr": 1e-2},
    {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1},
    {"lr": 1e-2, "amsgrad": True},
    {"lr": 1e-3, "maximize": True, "weight_decay": 0.0},
]
SGD = [
    {"lr": 1e-2},
    {"lr": 1e-2, "momentum": 0.9},
    {"lr": 1e-2, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01},
    {"lr": 1e-3, "momentum": 0.8, "dampening": 0.2, "maximize": True},
]


def trajectory(t, make, configs, dtype, rtol):
    """Steps on a fixed quartic with gradients that never settle, and records every hundredth state."""
    name = str(dtype).removeprefix("torch.")
    starts = [t.give(f"{name}.start.{index}", torch.randn(shape, dtype=dtype)) for index, shape in enumerate(SHAPES)]
    targets = [t.give(f"{name}.target.{index}", torch.randn(1000, dtype=dtype)) for index, _ in enumerate(SHAPES)]
    for number, config in enumerate(configs):
        params = [start.clone().requires_grad_() for start in starts]
        opt = make(params, **config)
        for step in range(1000):
            # The last parameter has no gradient on every third step.
            used = len(params) - (step % 3 == 2)
            for index in range(used):
                params[index].grad = torch.sin(params[index].detach() - targets[index][step])
            opt.step()
            opt.zero_grad()
            if step % 100 == 99:
                for index, param in enumerate(params):
                    t.expect(f"{name}.{number}.{step}.{index}", param, rtol=rtol, atol=rtol)


@case
def fused_adamw(t):
    t.tell("configs", ADAMW)
    for dtype, rtol in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        trajectory(t, lambda params, **options: torch.optim.AdamW(params, fused=True, **options), ADAMW, dtype, rtol)


@case
def fused_sgd(t):
    t.tell("configs", SGD)
    for dtype, rtol in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        trajectory(t, lambda params, **options: torch.optim.SGD(params, fused=True, **options), SGD, dtype, rtol)


@case
def clip_grad_norm(t):
    """Norms and clipped gradients, for bounds on both sides of the norm."""
    bounds = [0.0, 0.1, 1.0, 5.0, 1e4]
    t.tell("bounds", bounds)
    for dtype in (torch.float32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        grads = [t.give(f"{name}.{index}", torch.randn(shape, dtype=dtype)) for index, shape in enumerate(SHAPES)]
        for number, bound in enumerate(bounds):
            params = [torch.zeros_like(grad, requires_grad=True) for grad in grads]
            for param, grad in zip(params, grads):
                param.grad = grad.clone()
            norm = torch.nn.utils.clip_grad_norm_(params, bound, foreach=True)
            t.expect(f"{name}.{number}.norm", norm)
            for index, param in enumerate(params):
                t.expect(f"{name}.{number}.{index}", param.grad)
