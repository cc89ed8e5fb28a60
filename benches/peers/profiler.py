"""PyTorch's side of `versus profile`. Answers each line `MODEL_WHAT STEPS`:

- `added`: the seconds that the profiler adds to a step
- `relative`: the time of a step under the profiler over that without, from the last `added`
- `export`: the seconds to write the trace of so many steps
- `operators`: the self CPU seconds per step of the model's main operators, from the profile of the last `export`
"""

import json
import os
import statistics
import sys
import time

import torch
from torch.profiler import ProfilerActivity, profile

# A sample of the overhead is the median of this many differences.
ROUNDS = 5
# The operators with most of a model's arithmetic, one in forward and one in backward.
OPERATORS = {
    "mlp": ("aten::addmm", "aten::mm"),
    "cnn": ("aten::mkldnn_convolution", "aten::convolution_backward"),
}


def training(model, shape):
    """A training step with AdamW on random data."""
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loss_fn = torch.nn.CrossEntropyLoss()
    x, y = torch.randn(shape), torch.randint(0, 10, shape[:1])

    def step():
        opt.zero_grad()
        loss_fn(model(x), y).backward()
        opt.step()

    return step


def mlp():
    nn = torch.nn
    return nn.Sequential(nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def cnn():
    nn = torch.nn
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(1568, 64), nn.ReLU(), nn.Linear(64, 10))


def timed(step, count):
    """Seconds per step."""
    started = time.perf_counter()
    for _ in range(count):
        step()
    return (time.perf_counter() - started) / count


def record(step, count):
    """Seconds per step under the profiler, which records shapes, memory and FLOPs, and the profile."""
    prof = profile(activities=[ProfilerActivity.CPU], record_shapes=True, profile_memory=True, with_flops=True)
    prof.start()
    # The first step under a profiler allocates its buffers.
    step()
    seconds = timed(step, count)
    prof.stop()
    return seconds, prof


def export(prof, path):
    started = time.perf_counter()
    prof.export_chrome_trace(path)
    return time.perf_counter() - started


def main():
    path = os.path.join(json.loads(sys.argv[1])["folder"], "theirs.json")
    torch.set_num_threads(1)
    steps = {"mlp": training(mlp(), (64, 784)), "cnn": training(cnn(), (2, 1, 28, 28))}
    for step in steps.values():
        timed(step, 3)
    relative = operators = 0.0
    print(torch.__version__, flush=True)
    for line in sys.stdin:
        name, count = line.split()
        model, what = name.split("_")
        step, count = steps[model], int(count)
        if what == "added":
            rounds = [(timed(step, count), record(step, count)[0]) for _ in range(ROUNDS)]
            relative = statistics.median(under / alone for alone, under in rounds)
            answer = statistics.median(under - alone for alone, under in rounds)
        elif what == "relative":
            answer = relative
        elif what == "operators":
            answer = operators
        else:
            prof = record(step, count)[1]
            answer = export(prof, path)
            sums = {event.key: event.self_cpu_time_total for event in prof.key_averages()}
            operators = sum(sums[name] for name in OPERATORS[model]) / 1e6 / (count + 1)
        print(answer, flush=True)


if __name__ == "__main__":
    main()
