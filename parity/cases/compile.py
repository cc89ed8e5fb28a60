"""Training steps compiled by `torch.compile`."""

import os
import shutil

import torch
from harness import case

COMPILER = os.environ.get("CXX", "g++")
if not shutil.which(COMPILER):
    raise ModuleNotFoundError("Inductor needs a C++ compiler", name="g++")
SIZES = [16] * 5 + [7] * 5 + [9] * 4 + [16] * 2


@case
def compiled_steps(t):
    """Losses and parameters of a network whose batches have several sizes, of which the second is compiled for all."""
    t.tell("sizes", SIZES)
    weights = [t.give(f"weight.{i}", torch.randn(shape) * 0.3) for i, shape in enumerate([(12, 24), (24,), (24, 5)])]
    weights = [weight.clone().requires_grad_() for weight in weights]
    opt = torch.optim.AdamW(weights, lr=1e-2)

    @torch.compile
    def loss_of(x, y):
        hidden = torch.nn.functional.gelu(x @ weights[0])
        hidden = torch.nn.functional.layer_norm(hidden, (24,), weights[1])
        return torch.nn.functional.cross_entropy(hidden @ weights[2], y)

    for step, size in enumerate(SIZES):
        x = t.give(f"x.{step}", torch.randn(size, 12))
        y = t.give(f"y.{step}", torch.randint(5, (size,)))
        loss = loss_of(x, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        t.expect(f"loss.{step}", loss, rtol=1e-5)
    for index, weight in enumerate(weights):
        t.expect(f"weight.{index}", weight, rtol=1e-5, atol=1e-5)
