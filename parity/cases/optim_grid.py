"""Optimizers of PyTorch over its own test grid of options, 1,000 steps each."""

import torch
from harness import case
from optim import ADAMW, SGD, SHAPES, trajectory
from torch.testing._internal.common_optimizers import optim_db

# Options in addition to PyTorch's grid.
EXTRA = {
    "Adam": ADAMW,
    "AdamW": ADAMW,
    "SGD": SGD,
    "RMSprop": [{"alpha": 0.9, "eps": 1e-6, "momentum": 0.9}],
    "Adagrad": [{"eps": 1e-6, "lr": 0.05, "maximize": True}],
    "Adafactor": [{"eps": (1e-20, 1e-2), "beta2_decay": -0.5, "lr": 0.1}],
    "Muon": [{"nesterov": False, "eps": 1e-5}, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}],
}


def plain(kwargs):
    """Options for JSON; a learning rate that is a tensor becomes a number."""
    return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}


def grid(t, name, implementations):
    """Trajectories of one optimizer with each of its implementations, in both precisions."""
    (info,) = [info for info in optim_db if info.optim_cls.__name__ == name]
    configs = [plain(given.kwargs) for given in info.optim_inputs_func(device=torch.device("cpu"))] + EXTRA[name]
    t.tell("configs", configs)
    t.tell("implementations", implementations)
    shapes = [shape if name != "Muon" else (shape + (3,))[:2] for shape in SHAPES]
    t.tell("parameters", len(shapes))
    for implementation in implementations:
        how = {} if implementation == "default" else {implementation: True}
        for dtype, rtol in ((torch.float32, 1e-6), (torch.float64, 1e-9)):
            make = lambda params, **options: info.optim_cls(params, **how, **options)
            starts = [torch.randn(shape, dtype=dtype) for shape in shapes]
            trajectory(t, make, configs, dtype, rtol, starts, f"{implementation}.")


@case
def grid_adam(t):
    grid(t, "Adam", ["fused", "foreach"])


@case
def grid_adamw(t):
    grid(t, "AdamW", ["fused", "foreach"])


@case
def grid_sgd(t):
    grid(t, "SGD", ["fused", "foreach"])


@case
def grid_rmsprop(t):
    grid(t, "RMSprop", ["foreach"])


@case
def grid_adagrad(t):
    grid(t, "Adagrad", ["fused", "foreach"])


@case
def grid_adafactor(t):
    grid(t, "Adafactor", ["foreach"])


@case
def grid_muon(t):
    grid(t, "Muon", ["default"])
