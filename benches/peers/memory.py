"""PyTorch's side of `versus memory`. Answers each line `WAY-time STEPS` with the seconds of so many forward and backward
passes, and `WAY-bytes 1` with the most memory that one of them has at once. Ways: `plain`, `checkpoint`, `selective`.
`hooks-time TENSORS`: the seconds that hooks which do nothing add to so many saved tensors, by the fastest passes with and without."""

import contextlib
import functools
import json
import sys
import time

import torch
from torch import nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default,
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default]


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.norm2 = nn.LayerNorm(width)
        self.widen = nn.Linear(width, 4 * width)
        self.narrow = nn.Linear(4 * width, width)

    def forward(self, x):
        _, length, width = x.shape
        heads = (part.view(-1, length, 4, width // 4).transpose(1, 2) for part in self.attention(self.norm1(x)).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.project(mixed.transpose(1, 2).reshape(-1, length, width))
        return x + self.narrow(functional.gelu(self.widen(self.norm2(x))))


class Gpt(nn.Module):
    def __init__(self, blocks, width, length, vocabulary):
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList([Block(width) for _ in range(blocks)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, run):
        x = self.tokens(tokens) + self.places(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = run(block, x)
        return self.head(self.norm(x)).flatten(0, 1)


def chain(tensors, hooks):
    x = torch.ones(1, requires_grad=True)
    started = time.perf_counter()
    with hooks:
        y = x
        for _ in range(tensors):
            y = y.sin()
    y.backward()
    return time.perf_counter() - started


def main():
    options = json.loads(sys.argv[1])
    torch.set_num_threads(1)
    model = Gpt(options["blocks"], options["width"], options["length"], options["vocabulary"])
    size = (options["batch"], options["length"])
    tokens, targets = torch.randint(options["vocabulary"], size), torch.randint(options["vocabulary"], (size[0] * size[1],))
    again = functools.partial(checkpoint, use_reentrant=False)
    ways = {
        "plain": lambda block, x: block(x),
        "checkpoint": again,
        "selective": functools.partial(
            again, context_fn=functools.partial(create_selective_checkpoint_contexts, PRODUCTS)),
    }

    def step(run):
        functional.cross_entropy(model(tokens, run), targets).backward()

    def peak(run):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as profiled:
            step(run)
        bytes_now = most = 0
        events = profiled.profiler.kineto_results.events()
        for event in sorted((event for event in events if event.name() == "[memory]"), key=lambda event: event.start_ns()):
            bytes_now += event.nbytes()
            most = max(most, bytes_now)
        return most

    for run in ways.values():
        step(run)
    print(torch.__version__, flush=True)
    for line in sys.stdin:
        name, count = line.split()
        if name == "hooks-time":
            kept = functools.partial(
                torch.autograd.graph.saved_tensors_hooks, lambda tensor: tensor, lambda tensor: tensor)
            passes = [(chain(int(count), contextlib.nullcontext()), chain(int(count), kept())) for _ in range(30)]
            without, with_hooks = map(min, zip(*passes))
            print(with_hooks - without, flush=True)
            continue
        way, what = name.split("-")
        if what == "bytes":
            print(peak(ways[way]), flush=True)
            continue
        started = time.perf_counter()
        for _ in range(int(count)):
            step(ways[way])
        print(time.perf_counter() - started, flush=True)


if __name__ == "__main__":
    main()
