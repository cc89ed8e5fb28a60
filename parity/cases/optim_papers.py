"""Optimizers that PyTorch lacks, against references written from their papers, one parameter at a time."""

import torch
from harness import case
from optim import SHAPES, trajectory


class Reference:
    """Base of the references: options, one state per parameter, and the loop over parameters with a gradient."""

    defaults = {}

    def __init__(self, params, **options):
        self.params = params
        self.options = self.defaults | options
        self.states = [{} for _ in params]

    @torch.no_grad()
    def step(self):
        for param, state in zip(self.params, self.states):
            if param.grad is not None:
                grad = -param.grad if self.options["maximize"] else param.grad
                state["step"] = state.get("step", 0) + 1
                param.copy_(self.updated(param.detach(), grad, state, **self.options))

    def zero_grad(self):
        for param in self.params:
            param.grad = None


class Lion(Reference):
    """Chen et al., 2023, algorithm 2."""

    defaults = {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "maximize": False}

    def updated(self, x, g, state, lr, betas, weight_decay, maximize):
        m = state.get("m", torch.zeros_like(x))
        c = betas[0] * m + (1 - betas[0]) * g
        state["m"] = betas[1] * m + (1 - betas[1]) * g
        return x - lr * (torch.sign(c) + weight_decay * x)


class Lamb(Reference):
    """You et al., 2020, algorithm 2, with phi the identity."""

    defaults = {
        "lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-6, "weight_decay": 0.01, "adaptive": True, "maximize": False,
    }

    def updated(self, x, g, state, lr, betas, eps, weight_decay, adaptive, maximize):
        state["m"] = betas[0] * state.get("m", torch.zeros_like(x)) + (1 - betas[0]) * g
        state["v"] = betas[1] * state.get("v", torch.zeros_like(x)) + (1 - betas[1]) * g**2
        m = state["m"] / (1 - betas[0] ** state["step"])
        v = state["v"] / (1 - betas[1] ** state["step"])
        update = m / (torch.sqrt(v) + eps) + weight_decay * x
        lengths = x.norm(), update.norm()
        ratio = lengths[0] / lengths[1] if adaptive and lengths[0] > 0 and lengths[1] > 0 else 1.0
        return x - lr * ratio * update


class Lars(Reference):
    """You et al., 2017, algorithm 1."""

    defaults = {
        "lr": 1.0, "momentum": 0.9, "weight_decay": 5e-4, "trust_coefficient": 1e-3, "adaptive": True,
        "maximize": False,
    }

    def updated(self, w, g, state, lr, momentum, weight_decay, trust_coefficient, adaptive, maximize):
        local = 1.0
        if adaptive and w.norm() > 0 and g.norm() > 0:
            local = trust_coefficient * w.norm() / (g.norm() + weight_decay * w.norm())
        step = lr * local * (g + weight_decay * w)
        state["v"] = momentum * state.get("v", torch.zeros_like(w)) + step
        return w - state["v"]


def papers(t, reference, configs):
    t.tell("configs", configs)
    t.tell("implementations", ["foreach"])
    t.tell("parameters", len(SHAPES) + 1)
    # One parameter starts at 0, so its norm is 0.
    starts = [torch.zeros(3, dtype=torch.float64)] + [torch.randn(shape, dtype=torch.float64) for shape in SHAPES]
    trajectory(t, reference, configs, torch.float64, 1e-9, starts, "foreach.")


@case
def paper_lion(t):
    papers(t, Lion, [{}, {"lr": 1e-2, "weight_decay": 0.1}, {"betas": (0.8, 0.95), "lr": 1e-3, "maximize": True}])


@case
def paper_lamb(t):
    papers(t, Lamb, [
        {}, {"lr": 1e-2, "weight_decay": 0.0, "eps": 1e-8}, {"betas": (0.8, 0.95), "maximize": True, "lr": 1e-2},
        {"adaptive": False, "lr": 1e-2},
    ])


def sharpness_aware(t, start, target, rho, adaptive, lr, momentum):
    """Kwon et al., 2021, algorithm 1 with T_w = |w|, or Foret et al., 2021, with T_w = 1; around SGD."""
    params, velocities = list(start), [torch.zeros_like(p) for p in start]
    for step in range(200):
        # The last parameter has no gradient on every third step.
        used = range(len(params) - (step % 3 == 2))
        gradients = lambda points: [torch.sin(points[index] - target[index][step]) for index in used]
        scales = [params[index].abs() if adaptive else torch.ones_like(params[index]) for index in used]
        first = gradients(params)
        norm = torch.stack([(scale * g).norm() for scale, g in zip(scales, first)]).norm()
        nearby = [params[index] + rho * scales[index] ** 2 * first[index] / norm for index in used]
        for index, g in zip(used, gradients(nearby)):
            velocities[index] = momentum * velocities[index] + g
            params[index] = params[index] - lr * velocities[index]
        if step % 20 == 19:
            yield step, params


@case
def paper_asam(t):
    configs = [
        {"rho": 2.0, "adaptive": True, "lr": 0.02, "momentum": 0.0}, {"rho": 0.5, "adaptive": True, "lr": 0.1, "momentum": 0.0},
        {"rho": 0.05, "adaptive": False, "lr": 0.1, "momentum": 0.5},
    ]
    t.tell("configs", configs)
    shapes = [(3,), *SHAPES]
    t.tell("parameters", len(shapes))
    start = [t.give(f"start.{index}", torch.randn(shape, dtype=torch.float64)) for index, shape in enumerate(shapes)]
    target = [t.give(f"target.{index}", torch.randn(200, dtype=torch.float64)) for index, _ in enumerate(shapes)]
    for number, config in enumerate(configs):
        for step, params in sharpness_aware(t, start, target, **config):
            for index, param in enumerate(params):
                t.expect(f"{number}.{step}.{index}", param, rtol=1e-9, atol=1e-9)


@case
def paper_lars(t):
    papers(t, Lars, [
        {}, {"lr": 5.0, "momentum": 0.0}, {"weight_decay": 0.0, "trust_coefficient": 0.01, "maximize": True},
        {"adaptive": False, "lr": 1e-2},
    ])
