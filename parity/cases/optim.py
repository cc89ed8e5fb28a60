"""Shared by all optimizers: trajectories over 1,000 steps, gradient clipping, averaged weights, bad gradients."""

import torch
from harness import case
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

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


def trajectory(t, make, configs, dtype, rtol, starts, label, complete=False):
    """Steps with gradients sin(param - target), whose targets change randomly, and records every hundredth step."""
    t.tell("complete", complete)
    name = label + str(dtype).removeprefix("torch.")
    starts = [t.give(f"{name}.start.{index}", start) for index, start in enumerate(starts)]
    targets = [t.give(f"{name}.target.{index}", torch.randn(1000, dtype=dtype)) for index, _ in enumerate(starts)]
    for number, config in enumerate(configs):
        params = [start.clone().requires_grad_() for start in starts]
        opt = make(params, **config)
        for step in range(1000):
            # The last parameter has no gradient on every third step, unless `complete`.
            used = len(params) - (step % 3 == 2 and not complete)
            for index in range(used):
                params[index].grad = torch.sin(params[index].detach() - targets[index][step])
            opt.step()
            opt.zero_grad()
            if step % 100 == 99:
                for index, param in enumerate(params):
                    t.expect(f"{name}.{number}.{step}.{index}", param, rtol=rtol, atol=rtol)


@case
def clip_grad_norm(t):
    """Norms and clipped gradients, for bounds below and above the norm."""
    bounds = [0.0, 0.1, 1.0, 5.0, 1e4]
    orders = [1.0, 2.0, 3.5, "inf"]
    t.tell("bounds", bounds)
    t.tell("orders", orders)
    for dtype in (torch.float32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        grads = [t.give(f"{name}.{index}", torch.randn(shape, dtype=dtype)) for index, shape in enumerate(SHAPES)]
        for number, (bound, order) in enumerate((bound, order) for bound in bounds for order in orders):
            params = with_gradients(grads)
            norm = torch.nn.utils.clip_grad_norm_(params, bound, norm_type=float(order), foreach=True)
            t.expect(f"{name}.{number}.norm", norm)
            for index, param in enumerate(params):
                t.expect(f"{name}.{number}.{index}", param.grad)


@case
def clip_grad_value(t):
    bounds = [0.0, 0.1, 1.0, 1e4]
    t.tell("bounds", bounds)
    for dtype in (torch.float32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        grads = [t.give(f"{name}.{index}", torch.randn(shape, dtype=dtype)) for index, shape in enumerate(SHAPES)]
        for number, bound in enumerate(bounds):
            params = with_gradients(grads)
            torch.nn.utils.clip_grad_value_(params, bound, foreach=True)
            for index, param in enumerate(params):
                t.expect(f"{name}.{number}.{index}", param.grad)


@case
def adafactor_nan(t):
    """One NaN or infinity in a vector's gradient spoils that element alone, and the whole of a matrix."""
    shapes, steps = ((33,), (33,), (7, 5), (4,)), 5
    bad = {(1, 0): float("nan"), (1, 1): float("inf"), (2, 2): float("nan")}
    t.tell("parameters", len(shapes))
    t.tell("steps", steps)
    for dtype, rtol in ((torch.float32, 1e-6), (torch.float64, 1e-9)):
        name = str(dtype).removeprefix("torch.")
        starts = [t.give(f"{name}.start.{index}", torch.randn(shape, dtype=dtype)) for index, shape in enumerate(shapes)]
        params = [start.clone().requires_grad_() for start in starts]
        opt = torch.optim.Adafactor(params, foreach=True)
        for step in range(steps):
            for index, param in enumerate(params):
                grad = torch.randn_like(param)
                grad.view(-1)[2] = bad.get((step, index), grad.view(-1)[2].item())
                param.grad = t.give(f"{name}.{step}.{index}", grad)
            opt.step()
            for index, param in enumerate(params):
                t.expect(f"{name}.{step}.{index}", param, rtol=rtol, atol=rtol)


@case
def averaged_model(t):
    """EMA and SWA of a model with batch norm, with and without its buffers."""
    for dtype, rtol in ((torch.float32, 1e-6), (torch.float64, 1e-7)):
        # PyTorch rounds SWA's weight to float32 for every dtype of the model: hence 1e-7.
        name = str(dtype).removeprefix("torch.")
        model = torch.nn.BatchNorm1d(7, dtype=dtype)
        model.num_batches_tracked = None  # tch does not have it
        averages = {
            "ema": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)),
            "swa": AveragedModel(model),
            "ema_with_buffers": AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True),
            "swa_with_buffers": AveragedModel(model, use_buffers=True),
        }
        names = ["weight", "bias", "running_mean", "running_var"]
        for step in range(20):
            for key in names:
                getattr(model, key).data.copy_(t.give(f"{name}.{step}.{key}", torch.randn(7, dtype=dtype)))
            for average in averages.values():
                average.update_parameters(model)
        for kind, average in averages.items():
            for key in names:
                t.expect(f"{name}.{kind}.{key}", getattr(average.module, key), rtol=rtol, atol=rtol)


def with_gradients(grads):
    """Parameters of zeros with copies of these gradients."""
    params = [torch.zeros_like(grad, requires_grad=True) for grad in grads]
    for param, grad in zip(params, grads):
        param.grad = grad.clone()
    return params
