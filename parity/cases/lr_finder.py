"""A sweep over learning rates, by the rules of Smith (2015) and Lightning's lr_find, and training after it."""

import copy

import torch
from harness import case

CONFIGS = [
    {"name": "sgd", "mode": "exponential", "min_lr": 1e-6, "max_lr": 30.0, "steps": 60, "threshold": 4.0},
    {"name": "adamw", "mode": "exponential", "min_lr": 1e-8, "max_lr": 1.0, "steps": 40, "threshold": None},
    {"name": "adamw", "mode": "linear", "min_lr": 1e-3, "max_lr": 0.5, "steps": 30, "threshold": 4.0},
]


def loss_of(weights, x, y):
    return (torch.tanh(x @ weights[0]) @ weights[1] - y).square().mean()


def step(opt, weights, x, y):
    loss = loss_of(weights, x, y)
    loss.backward()
    opt.step()
    opt.zero_grad()
    return loss.item()


def sweep(config, opt, batch):
    """The rates, the smoothed losses, and whether the loss diverged."""
    low, high, steps = config["min_lr"], config["max_lr"], config["steps"]
    lrs, losses, average, best = [], [], 0.0, float("inf")
    for number in range(1, steps + 1):
        share = number / steps
        lr = low if number == 1 else low * (high / low) ** share if config["mode"] == "exponential" else (
            low + share * (high - low))
        for group in opt.param_groups:
            group["lr"] = lr
        average = 0.98 * average + (1 - 0.98) * batch()
        smoothed = average / (1 - 0.98**number)
        lrs.append(lr)
        losses.append(smoothed)
        if number > 1 and config["threshold"] is not None and smoothed > config["threshold"] * best:
            return lrs, losses, True
        best = min(best, smoothed)
    return lrs, losses, False


@case
def sched_lr_finder(t):
    """Rates, losses and suggestions of three sweeps, and the losses of the training that goes on afterwards."""
    t.tell("configs", CONFIGS)
    x, y = t.give("x", torch.randn(64, 6)), t.give("y", torch.randn(64, 3))
    for number, config in enumerate(CONFIGS):
        weights = [torch.randn(6, 16) * 0.3, torch.randn(16, 3) * 0.3]
        for index, weight in enumerate(weights):
            t.give(f"{number}.{index}", weight)
            weight.requires_grad_()
        make = {"sgd": lambda: torch.optim.SGD(weights, 0.05, momentum=0.9),
                "adamw": lambda: torch.optim.AdamW(weights, 0.01, fused=True)}[config["name"]]
        opt = make()
        before = [step(opt, weights, x, y) for _ in range(3)]
        kept = copy.deepcopy((opt.state_dict(), [weight.detach() for weight in weights]))
        lrs, losses, diverged = sweep(config, opt, lambda: step(opt, weights, x, y))
        opt.load_state_dict(kept[0])
        with torch.no_grad():
            for weight, old in zip(weights, kept[1]):
                weight.copy_(old)
        after = [step(opt, weights, x, y) for _ in range(3)]
        seen = torch.tensor(losses[10:-1], dtype=torch.float64)
        best = torch.gradient(seen)[0].argmin().item() + 10
        for name, values in (("lrs", lrs), ("losses", losses), ("training", before + after), ("best", [lrs[best]])):
            t.expect(f"{number}.{name}", torch.tensor(values, dtype=torch.float64))
        t.expect(f"{number}.diverged", torch.tensor(diverged))
