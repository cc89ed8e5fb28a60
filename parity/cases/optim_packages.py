"""Schedule-free optimizers and Prodigy, in the versions of `.config/libtorch-requirements.txt`."""

import prodigyopt
import schedulefree
import torch
from harness import case
from optim import SHAPES

STEPS = 200


def trajectories(t, make, configs, each_step):
    """Steps with gradients sin(param - target), as `optim.trajectory`, in two groups with other weight decays.

    `each_step` gets a function that records parameters, after each step.
    """
    t.tell("configs", configs)
    t.tell("steps", STEPS)
    t.tell("parameters", len(SHAPES))
    for dtype in (torch.float32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        starts = [t.give(f"{name}.start.{index}", torch.randn(shape, dtype=dtype)) for index, shape in enumerate(SHAPES)]
        targets = [t.give(f"{name}.target.{index}", torch.randn(STEPS, dtype=dtype)) for index, _ in enumerate(SHAPES)]
        for number, config in enumerate(configs):
            params = [start.clone().requires_grad_() for start in starts]
            groups = [{"params": params[:2]}, {"params": params[2:], "weight_decay": 0.05}]
            opt = make(groups, **config)
            if hasattr(opt, "train"):
                opt.train()

            def record(label):
                for index, param in enumerate(params):
                    t.expect(f"{name}.{number}.{label}.{index}", param)

            for step in range(STEPS):
                used = len(params) - (step % 3 == 0)
                for index in range(used):
                    params[index].grad = torch.sin(params[index].detach() - targets[index][step])
                opt.step()
                opt.zero_grad()
                each_step(opt, step, record, lambda what, value: t.expect(
                    f"{name}.{number}.{step}.{what}", torch.tensor(value, dtype=torch.float64)))


def switching(opt, step, record, _):
    """Rates that change, and evaluations between steps."""
    if step % 25 == 24:
        record(f"{step}.train")
        opt.eval()
        record(f"{step}.eval")
        opt.train()
        for group in opt.param_groups:
            group["lr"] *= 0.9


@case
def schedule_free_sgd(t):
    trajectories(t, schedulefree.SGDScheduleFree, [
        {"lr": 0.1}, {"lr": 0.5, "momentum": 0.8, "weight_decay": 0.01}, {"lr": 0.2, "warmup_steps": 30, "r": 1.0},
        {"lr": 0.2, "warmup_steps": 5, "weight_lr_power": 0.0}, {"lr": 0.0},
    ], switching)


@case
def schedule_free_adamw(t):
    trajectories(t, schedulefree.AdamWScheduleFree, [
        {}, {"lr": 0.05, "betas": (0.95, 0.99), "eps": 1e-6, "weight_decay": 0.1}, {"lr": 0.02, "warmup_steps": 40},
        {"lr": 0.02, "r": 0.5, "weight_lr_power": 1.0},
    ], switching)


def measuring(opt, step, record, expect):
    group = opt.param_groups[0]
    expect("d", group["d"])
    if step % 25 == 24:
        record(str(step))
        for each in opt.param_groups:
            each["lr"] *= 0.9


@case
def prodigy_options(t):
    trajectories(t, prodigyopt.Prodigy, [
        {}, {"betas": (0.8, 0.99), "beta3": 0.95, "eps": 1e-6, "weight_decay": 0.01},
        {"decouple": False, "weight_decay": 0.1, "use_bias_correction": True}, {"lr": 0.5, "safeguard_warmup": True},
        {"d0": 1e-3, "d_coef": 2.0, "growth_rate": 1.02}, {"betas": (0.0, 0.99), "weight_decay": 0.01},
        {"betas": (0.0, 0.99), "decouple": False}, {"slice_p": 3},
    ], measuring)
