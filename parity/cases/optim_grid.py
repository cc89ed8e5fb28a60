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
    "Adadelta": [{"rho": 0.8, "eps": 1e-4, "lr": 0.5, "maximize": True}],
    "Adamax": [{"betas": (0.8, 0.95), "eps": 1e-6, "lr": 0.05}],
    "ASGD": [{"lr": 0.1, "lambd": 0.01, "alpha": 0.5, "t0": 10}, {"alpha": 0.6, "weight_decay": 0.1, "t0": 0}],
    "NAdam": [{"betas": (0.8, 0.95), "eps": 1e-6, "lr": 0.01, "decoupled_weight_decay": True, "weight_decay": 0.1, "maximize": True}],
    "RAdam": [{"betas": (0.8, 0.95), "lr": 0.01, "maximize": True}, {"betas": (0.9, 0.5)}],
    "Rprop": [{"etas": (0.3, 1.1), "step_sizes": (1e-3, 0.1), "lr": 0.05, "maximize": True}],
    "SparseAdam": [{"betas": (0.8, 0.95), "eps": 1e-6, "lr": 0.05}],
    "Muon": [{"nesterov": False, "eps": 1e-5}, {"adjust_lr_fn": "match_rms_adamw", "weight_decay": 0.0}],
}


def plain(kwargs):
    """Options for JSON; a learning rate that is a tensor becomes a number."""
    return {name: value.item() if isinstance(value, torch.Tensor) else value for name, value in kwargs.items()}


def optimizer(t, name):
    """Its class and the options to run it with."""
    (info,) = [info for info in optim_db if info.optim_cls.__name__ == name]
    configs = [plain(given.kwargs) for given in info.optim_inputs_func(device=torch.device("cpu"))] + EXTRA[name]
    t.tell("configs", configs)
    return info.optim_cls, configs


def grid(t, name, implementations):
    """Trajectories of one optimizer with each of its implementations, in both precisions."""
    optim_cls, configs = optimizer(t, name)
    t.tell("implementations", implementations)
    shapes = [shape if name != "Muon" else (shape + (3,))[:2] for shape in SHAPES]
    t.tell("parameters", len(shapes))
    for implementation in implementations:
        how = {} if implementation == "default" else {implementation: True}
        for dtype, rtol in ((torch.float32, 1e-6), (torch.float64, 1e-9)):
            make = lambda params, **options: optim_cls(params, **how, **options)
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


@case
def grid_adadelta(t):
    grid(t, "Adadelta", ["foreach"])


@case
def grid_adamax(t):
    grid(t, "Adamax", ["foreach"])


@case
def grid_asgd(t):
    grid(t, "ASGD", ["foreach"])


@case
def grid_nadam(t):
    grid(t, "NAdam", ["foreach"])


@case
def grid_radam(t):
    grid(t, "RAdam", ["foreach"])


@case
def grid_rprop(t):
    grid(t, "Rprop", ["foreach"])


@case
def grid_sparse_adam(t):
    """Sparse gradients, in which rows occur several times; of the second parameter, some have no rows."""
    optim_cls, configs = optimizer(t, "SparseAdam")
    for dtype, rtol in ((torch.float32, 1e-6), (torch.float64, 1e-9)):
        name = str(dtype).removeprefix("torch.")
        shapes = ((20, 5), (7, 3))
        starts = [t.give(f"{name}.start.{index}", torch.randn(shape, dtype=dtype)) for index, shape in enumerate(shapes)]
        rows = t.give(f"{name}.rows", torch.randint(20, (1000, 6)))
        for number, config in enumerate(configs):
            params = [start.clone().requires_grad_() for start in starts]
            opt = optim_cls(params, **config)
            for step in range(1000):
                # The second parameter has no gradient on every third step.
                for index, param in enumerate(params[: 2 - (step % 3 == 2)]):
                    used = rows[step, : 0 if index == 1 and step % 5 == 4 else 6] % len(param)
                    taken = torch.nn.functional.embedding(used, param, sparse=True)
                    (taken * torch.sin(taken.detach() * 3.0 + step)).sum().backward()
                opt.step()
                opt.zero_grad()
                if step % 100 == 99:
                    for index, param in enumerate(params):
                        t.expect(f"{name}.{number}.{step}.{index}", param, rtol=rtol, atol=rtol)
