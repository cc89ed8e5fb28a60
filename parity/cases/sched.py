"""Learning rate schedules, 500 random configurations each: several groups, with a restart from a saved state.

Both halves read a configuration as a dictionary: PyTorch's name of the schedule and its arguments.
"""

import copy
import math
import random
import warnings

import torch
from harness import case
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR

CONFIGURATIONS = 500
RTOL = 1e-12
MOVES_MOMENTUM = ("CyclicLR", "OneCycleLR")
WITHIN = 1e-9  # how far PyTorch's rounding may go below zero, relative to the base rate


def function(spec):
    """The function that a dictionary describes. Rust has the same three kinds."""
    a = spec["a"]
    return {
        "power": lambda x: a**x,
        "inverse": lambda x: 1.0 / (1.0 + a * x),
        "wave": lambda x: 1.0 + 0.5 * math.sin(a * x),
    }[spec["kind"]]


def functions(spec):
    return [function(each) for each in spec] if isinstance(spec, list) else function(spec)


def warmup_cosine(warmup, total, start, end):
    def factor(step):
        if step < warmup:
            return start + (1 - start) * step / warmup
        progress = min(1.0, (step - warmup) / (total - warmup))
        return end + (1 - end) * 0.5 * (1 + math.cos(math.pi * progress))

    return factor


def warmup_stable_decay(warmup, stable, decay, start, end, shape):
    left = {"linear": lambda p: 1 - p, "cosine": lambda p: 0.5 * (1 + math.cos(math.pi * p)),
            "1-sqrt": lambda p: 1 - math.sqrt(p)}[shape]

    def factor(step):
        if step < warmup:
            return start + (1 - start) * step / warmup
        if step < warmup + stable:
            return 1.0
        return end + (1 - end) * left(min(1.0, (step - warmup - stable) / decay))

    return factor


def inverse_sqrt(warmup):
    return lambda step: step / warmup if step < warmup else math.sqrt(warmup / step)


def noam(d_model, warmup):
    return lambda step: d_model**-0.5 * min((step + 1) ** -0.5, (step + 1) * warmup**-1.5)


# Schedules that PyTorch lacks, as factors for its LambdaLR.
FACTORS = {
    "WarmupCosine": warmup_cosine, "WarmupStableDecay": warmup_stable_decay, "InverseSqrt": inverse_sqrt, "Noam": noam,
}


def build(opt, spec):
    """The scheduler that a dictionary describes."""
    options = {key: value for key, value in spec.items() if key != "name"}
    name = spec["name"]
    if name in FACTORS:
        return lr_scheduler.LambdaLR(opt, FACTORS[name](**options))
    if name == "SequentialLR":
        parts = [build(opt, part) for part in options["schedulers"]]
        return lr_scheduler.SequentialLR(opt, parts, milestones=options["milestones"])
    if name == "ChainedScheduler":
        return lr_scheduler.ChainedScheduler([build(opt, part) for part in options["schedulers"]])
    if name == "SWALR":
        return SWALR(opt, **options)
    if "lr_lambda" in options:
        options["lr_lambda"] = functions(options["lr_lambda"])
    if options.get("scale_fn"):
        options["scale_fn"] = function(options["scale_fn"])
    return getattr(lr_scheduler, name)(opt, **options)


def optimizer(lrs):
    opt = torch.optim.SGD([{"params": [torch.zeros(1)], "lr": lr} for lr in lrs], lr=0.0, momentum=0.9)
    opt._opt_called = True  # suppresses a warning about the missing optimizer step, which takes time
    return opt


def trajectory(config):
    """Rates and momenta of every step, with a restart from a saved state."""
    opt = optimizer(config["lrs"])
    sched = build(opt, config["schedule"])
    rates, momenta = [], []
    for step in range(config["steps"] + 1):
        if step > 0:
            sched.step(*metric(config, step))
        if step == config["restart"]:
            state, opt_state = copy.deepcopy(sched.state_dict()), copy.deepcopy(opt.state_dict())
            opt = optimizer(config["lrs"])
            sched = build(opt, config["schedule"])
            sched.load_state_dict(state)
            opt.load_state_dict(opt_state)
            opt._opt_called = True
        rates.append([group["lr"] for group in opt.param_groups])
        momenta.append([group["momentum"] for group in opt.param_groups])
    return torch.tensor(rates, dtype=torch.float64), torch.tensor(momenta, dtype=torch.float64)


def metric(config, step):
    """The arguments of a step: none, or a metric. None means NaN, which JSON lacks."""
    if "metrics" not in config:
        return []
    value = config["metrics"][step - 1]
    return [math.nan if value is None else value]


def names(spec):
    """The names of all schedules in a dictionary."""
    return [spec["name"]] + [name for part in spec.get("schedulers", []) for name in names(part)]


def usable(config, rates):
    """The rates, or None if one is invalid. Slightly negative rates, and OneCycleLR's negative last one become zero."""
    highest = torch.tensor(config["lrs"], dtype=torch.float64).max().clamp_min(1e-3)
    if config["schedule"]["name"] == "OneCycleLR":
        rates[-1].clamp_(min=0.0)
    if not rates.isfinite().all() or (rates < -WITHIN * highest).any():
        return None
    return rates.clamp(min=0.0)


def within_range(config, momenta):
    """The momenta. An invalid value of OneCycleLR after its end is replaced by the end's value."""
    spec = config["schedule"]
    if spec["name"] == "OneCycleLR" and spec["cycle_momentum"]:
        ends = torch.tensor(spec["max_momentum"], dtype=torch.float64).expand(momenta.shape[1])
        momenta[-1] = torch.where((momenta[-1] >= 0) & (momenta[-1] < 1), momenta[-1], ends)
    return momenta


def run(t, draw):
    """Draws configurations until there are enough, and records PyTorch's rates and momenta for each."""
    warnings.simplefilter("ignore")
    r = random.Random(draw.__name__)
    configs, dropped = [], 0
    while len(configs) < CONFIGURATIONS:
        lrs = [r.choice([0.1, 1.0, 10 ** r.uniform(-5, 0)]) for _ in range(r.randint(1, 3))]
        steps = r.randint(20, 70)
        config = {"lrs": lrs, "steps": steps, "restart": r.randint(0, steps), "schedule": draw(r, lrs, steps)}
        config |= config["schedule"].pop("config", {})
        try:
            rates, momenta = trajectory(config)
        except ZeroDivisionError:  # a phase of OneCycleLR has no steps
            rates = None
        rates = rates if rates is None else usable(config, rates)
        if rates is None:
            dropped += 1
            assert dropped < CONFIGURATIONS, "most configurations are invalid"
            continue
        t.expect(f"{len(configs)}.lr", rates, rtol=RTOL)
        if any(name in MOVES_MOMENTUM for name in names(config["schedule"])):
            t.expect(f"{len(configs)}.momentum", within_range(config, momenta), rtol=RTOL)
        configs.append(config)
    t.tell("configs", configs)


def share(r, low=0.0, high=1.0):
    return r.choice([low, high, r.uniform(low, high)])


def per_group(r, lrs, draw):
    return [draw() for _ in lrs] if r.random() < 0.5 else draw()


def a_function(r):
    return r.choice([
        {"kind": "power", "a": r.uniform(0.8, 1.02)}, {"kind": "inverse", "a": r.uniform(0, 1)},
        {"kind": "wave", "a": r.uniform(0, 3)},
    ])


def lambda_lr(r, lrs, steps):
    return {"name": "LambdaLR", "lr_lambda": per_group(r, lrs, lambda: a_function(r))}


def multiplicative_lr(r, lrs, steps):
    return {"name": "MultiplicativeLR", "lr_lambda": per_group(r, lrs, lambda: a_function(r))}


def step_lr(r, lrs, steps):
    return {"name": "StepLR", "step_size": r.randint(1, steps), "gamma": r.uniform(0, 1.2)}


def multi_step_lr(r, lrs, steps):
    milestones = sorted(r.randint(0, steps) for _ in range(r.randint(0, 5)))
    return {"name": "MultiStepLR", "milestones": milestones, "gamma": r.uniform(0, 1.2)}


def constant_lr(r, lrs, steps):
    return {"name": "ConstantLR", "factor": share(r, 1e-3), "total_iters": r.randint(0, 2 * steps)}


def linear_lr(r, lrs, steps):
    total = r.randint(0, 2 * steps)
    return {"name": "LinearLR", "start_factor": share(r, 1e-3), "end_factor": share(r), "total_iters": total}


def exponential_lr(r, lrs, steps):
    return {"name": "ExponentialLR", "gamma": r.uniform(0.7, 1.05)}


def polynomial_lr(r, lrs, steps):
    return {"name": "PolynomialLR", "total_iters": r.randint(0, 2 * steps), "power": share(r, 0.0, 4.0)}


def cosine_annealing_lr(r, lrs, steps):
    t_max = r.choice([r.randint(1, 5), r.randint(1, 2 * steps)])
    return {"name": "CosineAnnealingLR", "T_max": t_max, "eta_min": r.choice([0.0, min(lrs) * r.random()])}


def cosine_annealing_warm_restarts(r, lrs, steps):
    options = {"T_0": r.randint(1, steps), "T_mult": r.randint(1, 3), "eta_min": r.choice([0.0, r.uniform(0, 0.1)])}
    return {"name": "CosineAnnealingWarmRestarts"} | options


def cyclic_lr(r, lrs, steps):
    spec = {
        "name": "CyclicLR", "base_lr": per_group(r, lrs, lambda: r.uniform(0, 0.1)),
        "max_lr": per_group(r, lrs, lambda: r.uniform(0.1, 1)), "step_size_up": r.randint(1, steps),
        "step_size_down": r.choice([None, r.randint(0, steps)]),
        "mode": r.choice(["triangular", "triangular2", "exp_range"]), "gamma": r.uniform(0.9, 1),
        "cycle_momentum": r.random() < 0.7, "base_momentum": per_group(r, lrs, lambda: r.uniform(0.5, 0.9)),
        "max_momentum": per_group(r, lrs, lambda: r.uniform(0.9, 0.99)),
    }
    if r.random() < 0.3:
        power = {"kind": "power", "a": r.uniform(0.9, 1)}
        spec |= {"scale_fn": power, "scale_mode": r.choice(["cycle", "iterations"])}
    return spec


def one_cycle_lr(r, lrs, steps):
    return {
        "name": "OneCycleLR", "max_lr": per_group(r, lrs, lambda: r.uniform(0.1, 1)), "total_steps": steps,
        "pct_start": r.choice([0.3, share(r)]), "anneal_strategy": r.choice(["cos", "linear"]),
        "cycle_momentum": r.random() < 0.7, "base_momentum": per_group(r, lrs, lambda: r.uniform(0.5, 0.9)),
        "max_momentum": per_group(r, lrs, lambda: r.uniform(0.9, 0.95)), "div_factor": r.uniform(1, 100),
        "final_div_factor": 10 ** r.uniform(0, 5), "three_phase": r.random() < 0.4,
    }


def reduce_lr_on_plateau(r, lrs, steps):
    metrics = [r.choice([1.0 / (1 + step), 0.5, r.random(), None, -r.random()]) for step in range(steps)]
    options = {
        "mode": r.choice(["min", "max"]), "factor": r.uniform(0, 0.99), "patience": r.randint(0, 6),
        "threshold": r.choice([0.0, 1e-4, r.uniform(0, 0.5)]), "threshold_mode": r.choice(["rel", "abs"]),
        "cooldown": r.randint(0, 5), "min_lr": per_group(r, lrs, lambda: r.choice([0.0, 0.01 * r.random()])),
        "eps": r.choice([1e-8, 1e-3]),
    }
    return {"name": "ReduceLROnPlateau", "config": {"metrics": metrics}} | options


SCALING = [
    multiplicative_lr, step_lr, multi_step_lr, constant_lr, linear_lr, exponential_lr, polynomial_lr,
    cosine_annealing_lr,
]
ABSOLUTE = [lambda_lr, cosine_annealing_warm_restarts]


def leaf(r, lrs, steps, cyclic):
    """Any schedule. `cyclic` holds at most one cyclic schedule, because PyTorch's share their entries in the groups."""
    if cyclic and r.random() < 0.3:
        spec = cyclic.pop()(r, lrs, steps)
        # Long enough for the schedule that contains it.
        return spec | ({"total_steps": 2 * steps + 4} if "total_steps" in spec else {})
    return r.choice(SCALING if r.random() < 0.8 else ABSOLUTE)(r, lrs, steps)


def plan(r, lrs, steps, depth, cyclic):
    """Schedules within schedules. Later parts of a sequence are single schedules: PyTorch supports no others there."""
    if depth == 0:
        return leaf(r, lrs, steps, cyclic)
    first = plan(r, lrs, steps, r.randint(0, depth - 1), cyclic)
    if r.random() < 0.5:
        others = [plan(r, lrs, steps, r.randint(0, depth - 1), cyclic) for _ in range(r.randint(0, 2))]
        return {"name": "ChainedScheduler", "schedulers": [first, *others]}
    milestones = sorted(r.sample(range(1, steps), r.randint(0, 3)))
    others = [leaf(r, lrs, steps, cyclic) for _ in milestones]
    return {"name": "SequentialLR", "schedulers": [first, *others], "milestones": milestones}


def one_cyclic(r):
    return [r.choice([cyclic_lr, one_cycle_lr])]


def sequential_lr(r, lrs, steps):
    milestones = sorted(r.sample(range(1, steps), r.randint(0, 4)))
    cyclic = one_cyclic(r)
    parts = [leaf(r, lrs, steps, cyclic) for _ in range(len(milestones) + 1)]
    return {"name": "SequentialLR", "schedulers": parts, "milestones": milestones}


def chained_scheduler(r, lrs, steps):
    cyclic = one_cyclic(r)
    return {"name": "ChainedScheduler", "schedulers": [leaf(r, lrs, steps, cyclic) for _ in range(r.randint(1, 4))]}


def nested(r, lrs, steps):
    return plan(r, lrs, steps, 3, one_cyclic(r))


def warmup_cosine_lr(r, lrs, steps):
    warmup = r.randint(0, steps)
    total = warmup + r.randint(1, steps)
    return {"name": "WarmupCosine", "warmup": warmup, "total": total, "start": share(r), "end": share(r)}


def warmup_stable_decay_lr(r, lrs, steps):
    options = {"warmup": r.randint(0, steps // 2), "stable": r.randint(0, steps // 2), "decay": r.randint(1, steps)}
    shape = r.choice(["linear", "cosine", "1-sqrt"])
    return {"name": "WarmupStableDecay", "start": share(r), "end": share(r), "shape": shape} | options


def inverse_sqrt_lr(r, lrs, steps):
    return {"name": "InverseSqrt", "warmup": r.randint(1, steps)}


def noam_lr(r, lrs, steps):
    return {"name": "Noam", "d_model": r.randint(1, 4096), "warmup": r.randint(1, steps)}


def swa_lr(r, lrs, steps):
    """On its own, or as the last part of a sequence, as averaging begins."""
    spec = {
        "name": "SWALR", "swa_lr": per_group(r, lrs, lambda: r.uniform(0, 1)), "anneal_epochs": r.randint(0, steps),
        "anneal_strategy": r.choice(["cos", "linear"]),
    }
    if r.random() < 0.3:
        return spec
    parts = [leaf(r, lrs, steps, one_cyclic(r)), spec]
    return {"name": "SequentialLR", "schedulers": parts, "milestones": [r.randint(1, steps - 1)]}


def layer_wise(r, lrs, steps):
    """Base rates that decrease by layer, with a schedule that scales them."""
    lr, decay, groups = 10 ** r.uniform(-5, 0), share(r, 0.3), r.randint(1, 12)
    by_layer = [lr * decay ** (groups - 1 - group) for group in range(groups)]
    config = {"lrs": by_layer, "layer_wise": [lr, decay, groups]}
    return r.choice([step_lr, exponential_lr, linear_lr, polynomial_lr])(r, by_layer, steps) | {"config": config}


DRAWS = (
    lambda_lr, multiplicative_lr, step_lr, multi_step_lr, constant_lr, linear_lr, exponential_lr, polynomial_lr,
    cosine_annealing_lr, cosine_annealing_warm_restarts, cyclic_lr, one_cycle_lr, reduce_lr_on_plateau, sequential_lr,
    chained_scheduler, nested, warmup_cosine_lr, warmup_stable_decay_lr, inverse_sqrt_lr, noam_lr, swa_lr, layer_wise,
)


def register(draw):
    def schedule(t):
        run(t, draw)

    schedule.__name__ = f"sched_{draw.__name__}"
    case(schedule)


for each in DRAWS:
    register(each)


@case
def sched_warm_restarts_between_steps(t):
    """CosineAnnealingWarmRestarts.step(epoch) for fractional epochs."""
    warnings.simplefilter("ignore")
    r = random.Random("between")
    configs, rates = [], []
    for _ in range(CONFIGURATIONS):
        lr, spec = 10 ** r.uniform(-5, 0), cosine_annealing_warm_restarts(r, [0.1], 20)
        epochs = [r.choice([r.uniform(0, 200), float(r.randint(0, 200)), r.randint(0, 800) / 4]) for _ in range(40)]
        opt = optimizer([lr])
        sched = build(opt, spec)
        found = []
        for epoch in epochs:
            sched.step(epoch)
            found.append(opt.param_groups[0]["lr"])
        configs.append({"lr": lr, "epochs": epochs, "schedule": spec})
        rates.append(found)
    t.tell("configs", configs)
    t.expect("lr", torch.tensor(rates, dtype=torch.float64), rtol=RTOL)
