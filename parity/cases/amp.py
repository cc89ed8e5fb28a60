"""Autocast's dtypes for PyTorch's own op lists, and runs of GradScaler."""

import random
import sys
import types

import torch
from harness import case


def autocast_lists():
    """PyTorch's own lists of what autocast must do on a CPU."""
    try:
        import expecttest  # noqa: F401  (torch.testing._internal imports it, but the lists do not need it)
    except ImportError:
        stub = types.ModuleType("expecttest")
        stub.TestCase = __import__("unittest").TestCase
        sys.modules["expecttest"] = stub
    from torch.testing._internal.autocast_test_lists import AutocastCPUTestLists

    return AutocastCPUTestLists(torch.device("cpu"))


def entries(lists):
    """(list, op, args, kwargs) for every entry, and for both low dtypes where the list has both."""
    for name in ("torch_expect_builtin_promote", "methods_expect_builtin_promote"):
        for op, bf16_args, fp16_args, _ in getattr(lists, name):
            yield name, op, bf16_args, {}
            yield name, op, fp16_args, {}
    for name in ("torch_16", "torch_fp32", "nn_16", "nn_fp32"):
        for op, args, *kwargs in getattr(lists, name):
            yield name, op, args, kwargs[0] if kwargs else {}
    for op, bf16_args, fp16_args in lists.torch_need_autocast_promote:
        yield "torch_need_autocast_promote", op, bf16_args, {}
        yield "torch_need_autocast_promote", op, fp16_args, {}


METHODS = {"__eq__": "eq", "__ge__": "ge", "__gt__": "gt", "__le__": "le", "__lt__": "lt", "__ne__": "ne",
           "__add__": "add", "__div__": "div", "__mul__": "mul"}


def positional(schema, args, kwargs):
    """All arguments in the schema's order, or None if these do not fit the schema."""
    names = [argument.name for argument in schema.arguments]
    if len(args) > len(names) or any(key not in names for key in kwargs):
        return None
    full = list(args)
    for argument in schema.arguments[len(args):]:
        if argument.name in kwargs:
            full.append(kwargs[argument.name])
        elif argument.has_default_value():
            full.append(argument.default_value)
        else:
            return None
    return full


def call(found, full):
    """Calls an overload with all of its arguments in the schema's order."""
    arguments = found._schema.arguments
    plain = [value for argument, value in zip(arguments, full) if not argument.kwarg_only]
    named = {argument.name: value for argument, value in zip(arguments, full) if argument.kwarg_only}
    return found(*plain, **named)


def overload(op, args, kwargs):
    """The overload of aten::op that takes these arguments, and all arguments in its order."""
    packet = getattr(torch.ops.aten, METHODS.get(op, op))
    for name in packet.overloads():
        found = getattr(packet, name)
        full = None if "out" in name else positional(found._schema, args, kwargs)
        if full is None:
            continue
        for casting in (False, True):  # some ops only work with the casting that autocast does
            try:
                with torch.autocast("cpu", torch.bfloat16, enabled=casting):
                    call(found, full)
                return found, full
            except (RuntimeError, TypeError):
                continue
    raise LookupError(f"no overload of {op} takes these arguments")


@case
def autocast_dtypes(t):
    """The dtype of every op of PyTorch's CPU autocast lists, in bfloat16 and float16 regions."""
    calls = []
    for index, (listed, op, args, kwargs) in enumerate(entries(autocast_lists())):
        found, full = overload(op, args, kwargs)
        encoded = []
        for place, value in enumerate(full):
            key = f"{index}.{place}"
            if isinstance(value, torch.Tensor):
                t.give(key, value)
                encoded.append({"tensor": key})
            elif isinstance(value, (list, tuple)) and value and isinstance(value[0], torch.Tensor):
                for item, tensor in enumerate(value):
                    t.give(f"{key}.{item}", tensor)
                encoded.append({"tensors": [f"{key}.{item}" for item in range(len(value))]})
            elif isinstance(value, (list, tuple)):
                encoded.append({"ints": list(value)})
            elif value is None:
                encoded.append("none")
            else:
                encoded.append({type(value).__name__: value})
        entry = {"name": found._schema.name, "overload": found._schema.overload_name, "args": encoded, "results": []}
        for kind in ("bfloat16", "float16"):
            label = f"{listed}.{op}.{index}.{kind}"
            try:
                with torch.autocast("cpu", getattr(torch, kind)):
                    result = call(found, full)
            except (RuntimeError, TypeError) as error:
                # An op that this build refuses in one of the dtypes must be refused in Rust as well.
                entry["results"].append({"kind": kind, "label": label, "refused": str(error).splitlines()[0]})
                t.expect(label, torch.empty(0, dtype=torch.bool))
                continue
            result = result[0] if isinstance(result, (tuple, list)) else result
            entry["results"].append({"kind": kind, "label": label, "refused": None})
            t.expect(label, torch.empty(0, dtype=result.dtype))
        calls.append(entry)
    t.tell("calls", calls)


STEPS = 25


def history(rng):
    """The options of one run and what happens at each of its steps."""
    steps = []
    for _ in range(STEPS):
        plant = rng.choices(["none", "inf", "-inf", "nan"], [12, 1, 1, 1])[0]
        steps.append({
            "plant": plant,
            "optimizer": rng.randrange(2),  # the one whose gradient gets it
            "unscale": rng.random() < 0.4,
            "new_scale": 2.0 ** rng.randint(0, 20) if rng.random() < 0.05 else None,
        })
    return {
        "init_scale": 2.0 ** rng.randint(0, 18) * rng.choice([1.0, 1.5, 1.1]),
        "growth_factor": rng.choice([2.0, 1.5, 3.7]),
        "backoff_factor": rng.choice([0.5, 0.25, 0.9]),
        "growth_interval": rng.choice([1, 2, 3, 7, 2000]),
        "fused": rng.random() < 0.5,
        "lr": rng.choice([0.1, 0.01]),
        "momentum": rng.choice([0.0, 0.9]),
        "steps": steps,
    }


def planted(h, number, which):
    """Whether this optimizer's gradient gets an infinity or NaN at this step.

    Not at the first step of fused SGD with momentum: PyTorch 2.11 then continues with uninitialised momentum. (The Rust
    side starts it at zero; crates/optim tests that.)
    """
    step = h["steps"][number]
    if number == 0 and h["fused"] and h["momentum"] > 0:
        return False
    return step["plant"] != "none" and step["optimizer"] == which


@case
def grad_scaler_histories(t):
    """200 runs with planted infinities and NaN: scale, tracker, skipped steps and parameters after each step."""
    rng = random.Random(0)
    histories = [history(rng) for _ in range(200)]
    for h in histories:
        for number, step in enumerate(h["steps"]):
            step["planted"] = [planted(h, number, which) for which in range(2)]
    t.tell("histories", histories)
    start = t.give("start", torch.randn(2, 6))
    grads = t.give("grads", torch.randn(STEPS, 2, 6))
    for index, h in enumerate(histories):
        params = [row.clone().requires_grad_() for row in start]
        opts = [torch.optim.SGD([p], lr=h["lr"], momentum=h["momentum"], fused=h["fused"], foreach=False) if h["fused"]
                else torch.optim.SGD([p], lr=h["lr"], momentum=h["momentum"], foreach=False) for p in params]
        scaler = torch.amp.GradScaler(
            "cpu", init_scale=h["init_scale"], growth_factor=h["growth_factor"], backoff_factor=h["backoff_factor"],
            growth_interval=h["growth_interval"])
        rows, values = [], []
        for number, step in enumerate(h["steps"]):
            skipped = []
            for which, (param, opt) in enumerate(zip(params, opts)):
                grad = grads[number, which].clone()
                if step["planted"][which]:
                    grad[number % 6] = float(step["plant"])
                scaler.scale((param * grad).sum()).backward()
                if step["unscale"]:
                    scaler.unscale_(opt)
                before = param.detach().clone()
                scaler.step(opt)
                skipped.append(float(torch.equal(before, param.detach())))
                opt.zero_grad()
            scaler.update(step["new_scale"])
            rows.append([scaler.get_scale(), float(scaler._get_growth_tracker()), *skipped])
            values.append(torch.stack([param.detach() for param in params]))
        t.expect(f"{index}.scale_tracker_skipped", torch.tensor(rows, dtype=torch.float64))
        t.expect(f"{index}.params", torch.stack(values))
