"""Shared by Python's contenders: timing, and the JSON lines that the benchmark reads. How they train is in the other files."""

import itertools
import json
import math
import os
import platform
import signal
import statistics
import sys
import time

# Ctrl-C in a terminal goes to the benchmark too, which says that it was interrupted.
signal.signal(signal.SIGINT, signal.SIG_DFL)

TORCH = "2.11.0"


def missing(reason):
    print(json.dumps({"Missing": f"{reason}: give a Python with torch {TORCH} and torchvision by --python"}), flush=True)
    sys.exit(0)


try:
    import PIL
    import torch
    import torchvision
except ImportError as error:
    missing(error)
if torch.__version__.split("+")[0] != TORCH:
    missing(f"it has torch {torch.__version__}")

JOB = json.loads(sys.argv[1])
CONTENDER = JOB["contender"]
TUNED = CONTENDER != "pytorch"
COMPILED = CONTENDER == "pytorch_compiled"
DEVICE = torch.device("cuda" if JOB["device"] == "cuda" else "cpu")
LEARNING_RATE = 1e-3
CUDA = DEVICE.type == "cuda"
# What tuned Python tries, as our combined contender does.
PRECISIONS = ["float32", "bfloat16", *(["tf32", "float16"] if CUDA else [])]
FUSED = [True, False]
# Short turns by which options are compared.
TRIALS = 3
VERSIONS = {
    "Python": platform.python_version(),
    "torch (Python)": torch.__version__,
    "torchvision": torchvision.__version__,
    "Pillow": PIL.__version__,
}


def say(**said):
    print(json.dumps(said), flush=True)


def synchronize():
    if CUDA:
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


def turn(trained, batches, settle, seconds):
    """Trains for some seconds like a long training does. Returns the inputs and the exact time."""
    # Those that workers have read while the contender waited for its turn are not used.
    for _ in range(trained.read_ahead):
        next(batches)
    if trained.read_ahead:
        trained.train(for_seconds(batches, settle))
    synchronize()
    batches.seconds, begun = 0.0, time.perf_counter()
    inputs, _ = trained.train(for_seconds(batches, seconds))
    synchronize()
    return inputs, time.perf_counter() - begun


def busy_seconds():
    """CPU seconds of the machine since it booted, without idle and stolen time."""
    with open("/proc/stat") as stat:
        user, nice, system, _, _, irq, softirq, *_ = map(int, stat.readline().split()[1:])
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")


def wait_until_idle():
    """Waits, for at most 1.5 s, until the machine is idle."""
    for _ in range(25):
        before = busy_seconds()
        time.sleep(0.06)
        if busy_seconds() - before <= 0.2 * 0.06:
            return


def nice_worker(_):
    """Workers with a low priority leave the cores to the threads that compute, as ours do."""
    os.nice(10)


def initial(model):
    """A model with the initial weights of the job's seed, which are those of our contenders too. Data keep their order."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(JOB["seed"])
        return model()


class Precision:
    """Forward and backward passes in one of `PRECISIONS`."""

    def __init__(self, name):
        self.name = name
        self.dtype = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name)
        self.scaler = torch.amp.GradScaler(DEVICE.type) if name == "float16" else None

    def autocast(self):
        if CUDA:
            torch.backends.cuda.matmul.allow_tf32 = self.name == "tf32"
        return torch.autocast(DEVICE.type, self.dtype, enabled=self.dtype is not None)

    def step(self, loss, optimizer):
        if self.scaler is None:
            loss.backward()
            optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(optimizer)
            self.scaler.update()


def tuned(options, tries, build):
    """Tries one option after the other, each with the best values of those before. Returns the options, and a text."""
    if JOB["options"]:
        return JOB["options"], "as tuned"
    options["precision"] = "bfloat16" if JOB["has_bf16"] else "float32"
    chosen = None
    for name, values in tries.items() if JOB["tries"] else ():
        # What was chosen so far goes on, beside the other values.
        begun = [] if chosen is None else [(options[name], *chosen)]
        options[name], *chosen = fastest(values, lambda value: build(**{**options, name: value}), begun)
    return options, in_words(options)


def in_words(options):
    """Chosen options, as the page shows them."""

    def words(name, value):
        if name == "as_bytes":
            return "copied as bytes" if value else "copied as float32"
        if isinstance(value, bool):
            return name if value else f"not {name}"
        if name == "workers":
            return plural(value, "worker")
        if name == "threads":
            return f"{value} of {plural(JOB['threads'], 'thread')} compute"
        if name == "crew":
            return f"{words('workers', value[1])}, {words('threads', value[0])}"
        return f"decoded with {value}" if name == "reader" else str(value)

    return ", ".join(words(name, value) for name, value in options.items())


def best_in_words(chosen, tried, what):
    """The best number of something, and which others were tried."""
    *others, last = map(str, tried)
    of = f", the fastest of {', '.join(others)} and {last}" if others else ""
    return plural(chosen, what) + of


def plural(number, what):
    return f"{number} {what}{'' if number == 1 else 's'}"


def fastest(options, build, begun=()):
    """The fastest option by the median of a few short turns each, taken in turns, and its training; `begun`: trainings of
    options that need not be built. One that fails is left out."""
    runs, error = [(*run, []) for run in begun], None
    for option in options:
        if option in (run[0] for run in begun):
            continue
        try:
            trained = build(option)
            batches = Waiting(endless(trained.loader))
            trained.train(itertools.islice(batches, 3))
            runs.append((option, trained, batches, []))
        except Exception as failure:
            error = failure
            print(f"{CONTENDER}: {option} failed in its trial: {failure}", file=sys.stderr)
    if not runs:
        raise error
    for _ in range(TRIALS if len(runs) > 1 else 0):
        for _, trained, batches, rates in runs:
            # The workers of the others still read ahead.
            wait_until_idle()
            inputs, seconds = turn(trained, batches, JOB["settle_seconds"] / TRIALS, JOB["turn_seconds"] / TRIALS)
            rates.append(inputs / seconds)
    return max(runs, key=lambda run: statistics.median(run[3] or [0.0]))[:3]


def best(options, build):
    """The fastest option; see `fastest`."""
    return options[0] if len(options) == 1 else fastest(options, build)[0]


def usual_workers():
    """The numbers of workers that most people try. A first look has no time to try."""
    most = JOB["threads"]
    return [0, *(count for count in (1, 2, 4, 8, 16) if count <= most)] if JOB["tries"] else [min(most, 8)]


def serve(build, choices, options=None, samples_of_an_input=1):
    """Answers the benchmark's requests until standard input ends.

    `build()` returns an object with `loader`, `read_ahead` (the most batches that its workers read ahead) and
    `train(batches)`, and for whole trainings `parts()` and `accuracy()`.
    """
    # Another order than the other contender of Python's.
    torch.manual_seed(JOB["seed"] + 1 + TUNED + COMPILED)
    trained = build()
    batches = Waiting(endless(trained.loader))
    peak = None
    say(Ready={"choices": choices, "options": options, "versions": VERSIONS})
    for line in sys.stdin:
        ask = json.loads(line)
        if ask == "Warm":
            # Not before, because in a first look all contenders start at the same time.
            trained.train(itertools.islice(batches, 3))
            if CUDA:
                torch.cuda.reset_peak_memory_stats()
            say(Warm=None)
        elif ask == "Turn":
            inputs, seconds = turn(trained, batches, JOB["settle_seconds"], JOB["turn_seconds"])
            samples = inputs * samples_of_an_input
            # A whole training holds a second model, and only some contenders make one.
            peak = torch.cuda.max_memory_allocated() if CUDA else None
            say(Turn={"seconds": seconds, "wait_seconds": batches.seconds, "samples": samples})
        else:
            if ask != "Mark":
                JOB["seed"] = ask["Whole"]
                training = whole(build)
            result = next(training)
            say(Mark=None) if result is None else say(Whole=result)
    say(End={"peak_device_bytes": peak})


def whole(build):
    """Trains new weights from opening the data to the last step. Yields at each mark, where the others train; neither that
    nor testing is timed. The last one yields the result."""
    torch.manual_seed(JOB["seed"])
    begun, not_timed, waited, marks = time.perf_counter(), 0.0, 0.0, []
    trained = build()
    parts = list(trained.parts())
    for at, batches in enumerate(parts):
        batches = Waiting(batches)
        _, loss = trained.train(batches)
        synchronize()
        waited += batches.seconds
        stopped = time.perf_counter()
        # JSON has no NaN.
        loss = loss if math.isfinite(loss) else None
        marks.append({"seconds": stopped - begun - not_timed, "loss": loss, "accuracy": trained.accuracy()})
        is_last = at + 1 == len(parts)
        yield {"seed": JOB["seed"], "seconds": marks[-1]["seconds"], "wait_seconds": waited, "marks": marks} if is_last else None
        not_timed += time.perf_counter() - stopped
