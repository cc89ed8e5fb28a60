"""timm's forms of LAMB, LARS and Adafactor, in the version of `.config/libtorch-requirements.txt`."""

import timm.optim
import torch
from harness import case
from optim import trajectory

# Includes a matrix and a convolution whose squares Adafactor factors by row and column, and others that it does not.
SHAPES = ((3,), (20, 18), (17, 18, 3), (7, 5), (1,))


def forms(t, reference, configs):
    t.tell("configs", configs)
    t.tell("implementations", ["foreach"])
    t.tell("parameters", len(SHAPES))
    starts = [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
    # One parameter starts at 0, so its norm is 0.
    starts[0].zero_()
    # timm's LAMB counts steps for the group, not for each parameter.
    trajectory(t, reference, configs, torch.float64, 1e-9, starts, "foreach.", complete=True)


@case
def timm_lamb(t):
    forms(t, timm.optim.Lamb, [
        {}, {"lr": 1e-2, "weight_decay": 0.0}, {"lr": 1e-2, "trust_clip": True, "max_grad_norm": 3.0},
        {"betas": (0.8, 0.95), "lr": 1e-2, "weight_decay": 0.0, "always_adapt": True},
    ])


@case
def timm_lars(t):
    forms(t, timm.optim.Lars, [
        {"momentum": 0.9, "weight_decay": 5e-4}, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.0},
        {"lr": 0.5, "momentum": 0.9, "weight_decay": 1e-3, "trust_clip": True},
        {"lr": 5.0, "momentum": 0.8, "weight_decay": 1e-3, "nesterov": True}, {"momentum": 0.0, "weight_decay": 1e-3},
    ])


@case
def timm_adafactor(t):
    forms(t, timm.optim.Adafactor, [{}, {"weight_decay": 0.1, "decay_rate": -0.5}, {"warmup_init": True}])
