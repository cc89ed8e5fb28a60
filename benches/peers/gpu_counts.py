"""PyTorch's side of `versus gpu-counts`, `host-time` and `gpu-times`. Trains at its best setting; the first two on a stand-in
for CUDA's runtime.

Without an argument: reads recipes as JSON from standard input, and prints a JSON list: for each recipe, the stand-in's
counts of some steps, the losses, and how far the weights have gone. With recipes as JSON in the argument: prints the
version, then answers each line `CLOCK-INDEX STEPS` with the seconds that so many steps of that recipe took: by the clock
`process` or `thread`, which count a processor's time, or `wall`, up to the end of the device's work.
"""

import contextlib
import ctypes
import json
import os
import sys
import time

import torch
from torch import nn
from torch.nn import functional

WARM_UP, STEPS = 4, 4
FUSED = {"AdamW", "Adam", "SGD"}
# Their best setting is the better one of both, count by count.
CAPTURABLE = {"NAdam", "RAdam", "Adamax", "Adadelta", "RMSprop", "Rprop", "ASGD"}


def mlp():
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10))


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1 = nn.LayerNorm(64)
        self.attention = nn.Linear(64, 192)
        self.project = nn.Linear(64, 64)
        self.norm2 = nn.LayerNorm(64)
        self.widen = nn.Linear(64, 256)
        self.narrow = nn.Linear(256, 64)

    def forward(self, x):
        q, k, v = (part.view(-1, 32, 4, 16).transpose(1, 2) for part in self.attention(self.norm1(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(-1, 32, 64))
        return x + self.narrow(functional.gelu(self.widen(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(96, 64)
        self.places = nn.Embedding(32, 64)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(64)
        self.head = nn.Linear(64, 96, bias=False)

    def forward(self, tokens):
        x = self.tokens(tokens) + self.places(torch.arange(32, device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)).flatten(0, 1)


class Lookup(nn.Module):
    """The next token by the last one alone, with sparse gradients."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(96, 96, sparse=True)

    def forward(self, tokens):
        return self.table(tokens.flatten())


MODELS = {
    "lookup": (Lookup, lambda: (torch.randint(96, (4, 32)), torch.randint(96, (128,)))),
    "mlp": (mlp, lambda: (torch.randn(64, 64), torch.randint(10, (64,)))),
    "cnn": (cnn, lambda: (torch.randn(16, 3, 32, 32), torch.randint(10, (16,)))),
    "gpt": (Gpt, lambda: (torch.randint(96, (4, 32)), torch.randint(96, (128,)))),
}


def images():
    return torch.randint(256, (16, 3, 32, 32)).to(torch.uint8), torch.randint(10, (16,))


def optimizer(name, params, capturable=False):
    params = list(params)
    if name == "Muon":
        return torch.optim.Muon([param for param in params if param.dim() == 2])
    if name == "LBFGS":
        return torch.optim.LBFGS(params, lr=0.1, max_iter=4, history_size=4)
    options = {"SGD": {"lr": 0.01, "momentum": 0.9}, "AdamW": {"lr": 1e-3}, "Adam": {"lr": 1e-3},
               "RMSprop": {"lr": 1e-3}}.get(name, {})
    best = {"fused": True} if name in FUSED else {} if name == "SparseAdam" else {"foreach": True}
    if capturable:
        best["capturable"] = True
    return getattr(torch.optim, name)(params, **options, **best)


def step_of(recipe, capturable=False):
    """A function that trains one step, and returns the loss."""
    torch.manual_seed(1)
    make, batch = MODELS[recipe["model"]]
    model = make()
    start = [param.detach().double() for param in model.parameters()]
    host = images() if recipe["upload"] and recipe["model"] == "cnn" else batch()
    model = model.cuda()
    device = tuple(part.cuda() for part in host)
    if recipe["upload"]:
        host = tuple(part.pin_memory() for part in host)
    opt = optimizer(recipe["optimizer"], model.parameters(), capturable)
    scaler = torch.amp.GradScaler("cuda", enabled=recipe["autocast"] == "float16")
    kind = getattr(torch, recipe["autocast"] or "bfloat16")
    averages = None
    if recipe["ema"]:
        averages = torch.optim.swa_utils.AveragedModel(
            model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.999))
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1, 0.99) if recipe["schedule"] else None
    total = torch.zeros((), device="cuda", dtype=torch.float64) if recipe["meter"] else None
    parts = recipe["accumulate"]

    def closure():
        opt.zero_grad()
        loss = functional.cross_entropy(model(device[0]), device[1])
        loss.backward()
        return loss

    def step():
        if recipe["optimizer"] == "LBFGS":
            return opt.step(closure).detach()
        inputs, targets = device
        if recipe["upload"]:
            inputs, targets = (part.to("cuda", non_blocking=True) for part in host)
            if inputs.dtype == torch.uint8:
                inputs = inputs / 255
        for some, wanted in zip(inputs.chunk(parts), targets.chunk(parts)):
            with torch.autocast("cuda", dtype=kind) if recipe["autocast"] else contextlib.nullcontext():
                loss = functional.cross_entropy(model(some), wanted)
            scaler.scale(loss / parts if parts > 1 else loss).backward()
        if recipe["clip"]:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
        if averages is not None:
            averages.update_parameters(model)
        if schedule is not None:
            schedule.step()
        if total is not None:
            total.add_(loss.detach(), alpha=targets.size(0))
        return loss.detach()

    def distance():
        moved = zip(model.parameters(), start)
        return sum((param.detach().cpu().double() - begin).square().sum() for param, begin in moved).sqrt().item()

    def kept():
        """How far the average of the weights is from them, the average of the losses, and the norm of the buffers."""
        pairs = zip(averages.module.parameters(), model.parameters()) if averages is not None else []
        apart = sum((average.detach().cpu().double() - now.detach().cpu().double()).square().sum().item()
                    for average, now in pairs)
        losses = total.item() / (WARM_UP + STEPS) / host[1].size(0) if total is not None else 0.0
        buffers = sum(buffer.cpu().double().square().sum().item() for buffer in model.buffers())
        return [apart ** 0.5, losses, buffers ** 0.5]

    step.scale, step.distance, step.kept = scaler.get_scale, distance, kept
    return step


def main():
    runtime = ctypes.CDLL("libcudart.so.13")
    runtime.fakecuda_counts.restype = runtime.fakecuda_notes.restype = ctypes.c_char_p
    ctypes.CDLL(os.environ["FAKECUDA_OPERATORS"])
    results = []

    def counted(recipe, capturable):
        step = step_of(recipe, capturable)
        losses = [step() for _ in range(WARM_UP)]
        scale = step.scale()
        runtime.fakecuda_reset()
        losses += [step() for _ in range(STEPS)]
        lines = runtime.fakecuda_counts().decode().splitlines()
        if step.scale() != scale:
            raise RuntimeError("the scaler has skipped a step")
        counts = {name: int(number) for name, number in (line.rsplit(": ", 1) for line in lines)}
        result = {"counts": counts, "distance": step.distance(), "kept": step.kept(),
                  "losses": [loss.item() for loss in losses]}
        notes = runtime.fakecuda_notes().decode()
        if notes:
            raise RuntimeError(f"the fake device noted: {notes}")
        return result

    for recipe in json.load(sys.stdin):
        try:
            result = counted(recipe, False)
            if recipe["optimizer"] in CAPTURABLE:
                result["capturable"] = counted(recipe, True)["counts"]
            results.append(result)
        except Exception as error:
            results.append({"error": str(error).split("\n")[0]})
    print(json.dumps(results))


def serve():
    torch.set_num_threads(1)
    # Its own time on the host is not in the stand-in.
    torch.backends.cudnn.enabled = "FAKECUDA_OPERATORS" not in os.environ
    steps = [step_of(recipe) for recipe in json.loads(sys.argv[1])]
    for step in steps:
        for _ in range(WARM_UP):
            step()
    print(torch.__version__, flush=True)
    for line in sys.stdin:
        name, times = line.split()
        clock, index = name.split("-")
        now = {"process": time.process_time, "thread": time.thread_time, "wall": synchronized}[clock]
        started = now()
        for _ in range(int(times)):
            steps[int(index)]()
        print(now() - started, flush=True)


def synchronized():
    torch.cuda.synchronize()
    return time.perf_counter()


if __name__ == "__main__":
    serve() if sys.argv[1:] else main()
