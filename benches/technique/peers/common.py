"""Shared by Python's contenders: timing, and the JSON lines that the benchmark reads. How they train is in the other files."""

import itertools
import json
import sys
import time

try:
    import torch
    import torchvision
except ImportError as error:
    print(json.dumps({"Missing": f"{error}: give a Python with torch and torchvision by --python"}), flush=True)
    sys.exit(0)

JOB = json.loads(sys.argv[1])
CONTENDER = JOB["contender"]
TUNED = CONTENDER != "pytorch"
COMPILED = CONTENDER == "pytorch_compiled"
DEVICE = torch.device("cuda" if JOB["device"] == "cuda" else "cpu")
LEARNING_RATE = 1e-3


def say(**said):
    print(json.dumps(said), flush=True)


def synchronize():
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def endless(loader):
    for _ in itertools.count():
        yield from loader


class Waiting:
    """An iterator that adds up the time spent in `next`."""

    def __init__(self, batches):
        self.batches, self.seconds = iter(batches), 0.0

    def __iter__(self):
        return self

    def __next__(self):
        begun = time.perf_counter()
        try:
            return next(self.batches)
        finally:
            self.seconds += time.perf_counter() - begun


def for_seconds(batches, seconds):
    """Yields batches until the time is over, at least one."""
    begun = time.perf_counter()
    while True:
        yield next(batches)
        if time.perf_counter() - begun >= seconds:
            return


def steady(trained, warm_up, steps):
    """Steps per second after a warm-up."""
    batches = endless(trained.loader)
    trained.train(itertools.islice(batches, warm_up))
    synchronize()
    begun = time.perf_counter()
    trained.train(itertools.islice(batches, steps))
    synchronize()
    return steps / (time.perf_counter() - begun)


def best(options, measure):
    """The option with the highest measure. A single option is not measured."""
    return options[0] if len(options) == 1 else max(options, key=measure)


def serve(build, choices, options=None, samples_of_an_input=1):
    """Answers the benchmark's requests until standard input ends.

    `build()` returns an object with `loader` and `train(batches)`, and for whole trainings `parts()` and `accuracy()`.
    """
    torch.manual_seed(JOB["seed"])
    trained = build()
    batches = Waiting(endless(trained.loader))
    trained.train(itertools.islice(batches, 3))
    say(Ready={"choices": choices, "options": options})
    for line in sys.stdin:
        ask = json.loads(line)
        if ask == "Turn":
            trained.train(for_seconds(batches, JOB["settle_seconds"]))
            synchronize()
            batches.seconds, begun = 0.0, time.perf_counter()
            inputs, _ = trained.train(for_seconds(batches, JOB["turn_seconds"]))
            synchronize()
            seconds = time.perf_counter() - begun
            samples = inputs * samples_of_an_input
            say(Turn={"seconds": seconds, "wait_seconds": batches.seconds, "samples": samples})
        else:
            JOB["seed"] = ask["Whole"]
            say(Whole=whole(build))
    peak = torch.cuda.max_memory_allocated() if DEVICE.type == "cuda" else None
    say(End={"peak_device_bytes": peak})


def whole(build):
    """Trains new weights from opening the data to the last step. Testing is not timed."""
    torch.manual_seed(JOB["seed"])
    begun, testing, waited, marks = time.perf_counter(), 0.0, 0.0, []
    trained = build()
    for batches in trained.parts():
        batches = Waiting(batches)
        _, loss = trained.train(batches)
        synchronize()
        waited += batches.seconds
        stopped = time.perf_counter()
        marks.append({"seconds": stopped - begun - testing, "loss": loss, "accuracy": trained.accuracy()})
        testing += time.perf_counter() - stopped
    return {"seed": JOB["seed"], "seconds": marks[-1]["seconds"], "wait_seconds": waited, "marks": marks}
