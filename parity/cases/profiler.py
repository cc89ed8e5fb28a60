"""What the profiler records of a model: sums, tables, and the format of traces."""

import json
import os
import random
import tempfile

import torch
import torch.nn.functional as F
from harness import case
from torch.autograd import DeviceType
from torch.autograd.profiler_util import EventList, FunctionEvent
from torch.profiler import ProfilerActivity, profile, record_function, schedule

KEYS = (
    "cpu_time", "cpu_time_total", "self_cpu_time_total", "cuda_time", "cuda_time_total", "self_cuda_time_total",
    "cpu_memory_usage", "self_cpu_memory_usage", "cuda_memory_usage", "self_cuda_memory_usage", "count", "flops", "key",
)


def given_model(t):
    """A small network and its data, the same here and in Rust."""
    weights = [torch.randn(shape) * 0.2 for shape in ((3, 1, 3, 3), (3,), (10, 75), (10,))]
    for index, weight in enumerate(weights):
        t.give(f"weight.{index}", weight)
        weight.requires_grad_()
    x = t.give("x", torch.randn(4, 1, 12, 12))
    targets = t.give("targets", torch.tensor([1, 7, 3, 9]))
    return weights, x, targets, t.give("lr", torch.tensor(0.1))


def step(weights, x, targets, lr):
    with record_function("forward"):
        hidden = F.max_pool2d(F.relu(F.conv2d(x, weights[0], weights[1])), 2)
        loss = F.nll_loss(F.log_softmax(F.linear(torch.flatten(hidden, 1), weights[2], weights[3]), 1), targets)
    del hidden  # as at the end of a block in Rust
    # As C++ starts a backward pass; Python would make this tensor with other operators.
    loss.backward(torch.ones_like(loss, memory_format=torch.contiguous_format))
    with record_function("update"), torch.no_grad():
        for weight in weights:
            weight.sub_(weight.grad * lr)
    # As tch's zero_grad does it.
    for weight in weights:
        weight.grad.detach_()
        weight.grad.zero_()


def text(t, name, lines):
    t.expect(name, torch.tensor(list(lines.encode()), dtype=torch.uint8))


@case
def profile_key_averages(t):
    """Every operator's calls, FLOPs and memory, by name and by shapes."""
    model = given_model(t)
    step(*model)
    with profile(
        activities=[ProfilerActivity.CPU], schedule=schedule(wait=1, warmup=1, active=3, repeat=1), record_shapes=True,
        profile_memory=True, with_flops=True, acc_events=True,
    ) as profiler:
        for _ in range(5):
            step(*model)
            profiler.step()
    for by_shape in (False, True):
        averages = profiler.key_averages(group_by_input_shape=by_shape)
        groups = {}
        for group in averages:
            shapes = f" {group.input_shapes}" if by_shape else ""
            groups[f"{group.key}{shapes}"] = group
        text(t, f"names.{by_shape}", "\n".join(sorted(groups)))
        for name, group in groups.items():
            t.expect(f"{by_shape}.{name}", torch.tensor([
                group.count, group.flops, group.cpu_memory_usage, group.self_cpu_memory_usage,
                int(group.is_user_annotation), group.scope,
            ]))
    total = profiler.events().total_average()
    t.expect("total", torch.tensor([total.count, total.flops, total.self_cpu_memory_usage]))


@case
def profile_schedules(t):
    """The actions of 300 schedules in 60 steps each."""
    rng = random.Random(6)
    configs, actions = [], []
    for _ in range(300):
        config = {
            "wait": rng.randrange(5), "warmup": rng.randrange(1, 4), "active": rng.randrange(1, 5),
            "repeat": rng.randrange(4), "skip_first": rng.randrange(8), "skip_first_wait": rng.randrange(2),
        }
        configs.append(config)
        at = schedule(**config)
        actions.append([at(step).value for step in range(60)])
    t.tell("configs", configs)
    t.expect("actions", torch.tensor(actions))


def planted_events(rng, cuda):
    """Made-up nested events with kernels and memory; times in whole microseconds."""
    names = ["aten::add", "aten::mm", "ProfilerStep#7", "a scope with a name of more than fifty characters, to be cut"]
    planted = []
    for thread in (1, 2):
        spans = [(0, 4000)]
        while spans:
            start, end = spans.pop()
            if end - start < 3 or len(planted) > 60:
                continue
            start = start + rng.randrange((end - start) // 2)
            middle = start + 1 + rng.randrange(end - start - 1)
            planted.append({
                "name": rng.choice(names), "thread": thread, "start": start, "end": middle,
                "shapes": [[rng.randrange(9) for _ in range(rng.randrange(4))] for _ in range(rng.randrange(3))],
                "memory": rng.choice([0, 17, 4096, -4096, 3 << 20, 5 << 30]),
                "device_memory": rng.choice([0, 512, 7 << 20]) if cuda else 0,
                "flops": rng.choice([0, 0, 1000, 2_500_000]), "is_async": rng.random() < 0.1, "cuda": False,
                "kernels": [rng.randrange(1, 50) for _ in range(rng.randrange(3))] if cuda else [],
            })
            spans += [(start, middle), (middle, end)]
    if cuda:
        for index in range(8):
            planted.append({
                "name": rng.choice(["void gemm<float>(float*)", "Memcpy HtoD"]), "thread": 7, "start": 100 * index,
                "end": 100 * index + rng.randrange(1, 90), "shapes": [], "memory": 0, "device_memory": 0, "flops": 0,
                "is_async": False, "cuda": True, "kernels": [],
            })
    return planted


def event_list(planted, cuda, profile_memory, with_flops):
    use_device = "cuda" if cuda else None
    events = []
    for index, one in enumerate(planted):
        event = FunctionEvent(
            id=index, name="ProfilerStep*" if one["name"].startswith("ProfilerStep#") else one["name"],
            overload_name="", trace_name=one["name"], thread=one["thread"], start_us=one["start"], end_us=one["end"],
            input_shapes=one["shapes"], stack=[], use_device=use_device, cpu_memory_usage=one["memory"],
            device_memory_usage=one["device_memory"], is_async=one["is_async"], flops=one["flops"],
            device_type=DeviceType.CUDA if one["cuda"] else DeviceType.CPU,
        )
        for duration in one["kernels"]:
            event.append_kernel("kernel", 0, duration)
        events.append(event)
    events.sort(key=lambda event: [event.time_range.start, -event.time_range.end])
    made = EventList(events, use_device=use_device, profile_memory=profile_memory, with_flops=with_flops)
    made._build_tree()
    return made


@case
def profile_tables(t):
    """PyTorch's tables of made-up events, character by character, for every key and every column."""
    rng = random.Random(7)
    runs = []
    for number in range(24):
        run = {"cuda": number % 2 == 1, "profile_memory": number % 3 != 0, "with_flops": number % 4 != 0}
        planted = planted_events(rng, run["cuda"])
        events = event_list(planted, **run)
        tables = []
        averages = {by: events.key_averages(group_by_input_shapes=by) for by in (False, True)}
        for sort_by in KEYS + (None,):
            options = {
                "sort_by": sort_by, "row_limit": rng.choice([3, 100, -1]), "max_name_column_width": rng.choice([55, 20, None]),
                "max_shapes_column_width": rng.choice([80, 12, None]), "header": rng.choice([None, "A header"]),
                "top_level_events_only": rng.random() < 0.3, "time_unit": rng.choice([None, "s", "ms", "us"]),
                "of": rng.choice(["events", "names", "shapes"]),
            }
            arguments = {key: value for key, value in options.items() if key != "of"}
            source = {"events": events, "names": averages[False], "shapes": averages[True]}[options["of"]]
            text(t, f"{number}.{len(tables)}", source.table(**arguments))
            tables.append(options)
        runs.append({**run, "events": planted, "tables": tables})
    t.tell("runs", runs)


@case
def profile_traces(t):
    """The keys of a trace's head, and the keys and argument names of every kind of event."""
    model = given_model(t)
    step(*model)
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True, with_flops=True) as profiler:
        for _ in range(2):
            step(*model)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "trace.json")
        profiler.export_chrome_trace(path)
        with open(path) as file:
            trace = json.load(file)
    text(t, "head", "\n".join(sorted(trace)))
    kinds = {}
    for event in trace["traceEvents"]:
        keys = ", ".join(sorted(event))
        arguments = ", ".join(sorted(event.get("args", {})))
        kind = f"{event['ph']} {event.get('cat', '')} {event['name']} [{keys}] [{arguments}]"
        kinds[kind] = kinds.get(kind, 0) + 1
    for kind, count in kinds.items():
        t.expect(kind, torch.tensor(count))
