"""L-BFGS, whose steps evaluate a closure: every option, in both precisions, bit for bit."""

import torch
from harness import case

STEPS = 8
WOLFE = {"line_search_fn": "strong_wolfe"}


def rosenbrock(params, _):
    x = params[0]
    head, tail = x[:-1], x[1:]
    return (100.0 * (tail - head * head).square() + (1.0 - head).square()).sum()


def network(params, data):
    """The last parameter is not used, and has no gradient."""
    x, y = data
    hidden = torch.tanh(x.matmul(params[0]) + params[1])
    return (hidden.matmul(params[2]) + params[3] - y).square().mean()


def trajectories(t, loss_of, starts, data, configs):
    t.tell("configs", configs)
    t.tell("steps", STEPS)
    t.tell("parameters", len(starts))
    for dtype in (torch.float32, torch.float64):
        name = str(dtype).removeprefix("torch.")
        given = [t.give(f"{name}.start.{index}", start.to(dtype)) for index, start in enumerate(starts)]
        inputs = [t.give(f"{name}.data.{index}", each.to(dtype)) for index, each in enumerate(data)]
        for number, config in enumerate(configs):
            params = [start.clone().requires_grad_() for start in given]
            opt = torch.optim.LBFGS(params, **config)

            def closure():
                opt.zero_grad()
                loss = loss_of(params, inputs)
                loss.backward()
                return loss

            for step in range(STEPS):
                loss = opt.step(closure)
                assert loss.isfinite(), f"configuration {number} diverges"
                t.expect(f"{name}.{number}.{step}.loss", loss)
                for index, param in enumerate(params):
                    t.expect(f"{name}.{number}.{step}.{index}", param)
            state = opt.state[params[0]]
            t.expect(f"{name}.{number}.func_evals", torch.tensor(state["func_evals"]))
            t.expect(f"{name}.{number}.n_iter", torch.tensor(state["n_iter"]))


@case
def lbfgs_rosenbrock(t):
    starts = [torch.tensor([-1.2, 1.0, -0.5, 2.0, 0.3])]
    trajectories(t, rosenbrock, starts, [], [
        WOLFE, WOLFE | {"max_iter": 3, "history_size": 2}, WOLFE | {"max_iter": 10, "max_eval": 4}, WOLFE | {"lr": 0.1},
        WOLFE | {"max_eval": 1, "max_iter": 5}, WOLFE | {"tolerance_grad": 1e-2, "tolerance_change": 1e-4},
        {"lr": 0.01, "history_size": 5}, {"lr": 1e-3, "max_iter": 1},
    ])


@case
def lbfgs_network(t):
    starts = [torch.randn(3, 6), torch.randn(6), torch.randn(6, 2), torch.randn(2), torch.randn(4, 1)]
    data = [torch.randn(32, 3), torch.randn(32, 2)]
    trajectories(t, network, starts, data, [
        WOLFE, WOLFE | {"max_iter": 4, "history_size": 3}, WOLFE | {"lr": 3.0, "max_eval": 7}, {"lr": 0.1},
        {"lr": 0.3, "max_iter": 6, "max_eval": 4}, {"lr": 0.1, "history_size": 4, "tolerance_change": 1e-3},
    ])
