"""Ranks of PyTorch over Gloo; as many Rust ranks must get the same results, two ranks bit for bit."""

import os
import pathlib
import socket
import subprocess
import sys
import tempfile

import torch
from harness import case

RANK = pathlib.Path(__file__).with_name("ddp_rank.py")


def ranks_of(count, job):
    """Runs `count` ranks of `ddp_rank.py` at a time, and returns what each rank saved."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(count):
            env = dict(os.environ, RANK=str(rank), WORLD_SIZE=str(count), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            env.update(OMP_NUM_THREADS="1")
            command = [sys.executable, str(RANK), job, f"{folder}/{rank}.pt"]
            ranks.append(subprocess.Popen(command, env=env))
        codes = [rank.wait(timeout=300) for rank in ranks]
        assert codes == [0] * count, f"{job}: the ranks ended with {codes}"
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(count)]


def give_training(t, ranks):
    from ddp_rank import KEPT, WAYS, batches, parameters

    t.tell("ways", list(WAYS))
    t.tell("kept", KEPT)
    for name, param in parameters().items():
        t.give(name, param)
    for rank in range(ranks):
        for step, (x, y) in enumerate(batches(rank)):
            t.give(f"x.{rank}.{step}", x)
            t.give(f"y.{rank}.{step}", y)


@case
def ddp_training(t):
    """Parameters during fifty steps, with each way of bucketing gradients."""
    give_training(t, 2)
    for name, tensor in ranks_of(2, "train")[0].items():
        t.expect(name, tensor)


@case
def ddp_training_of_more(t):
    """The same with three and with four ranks, whose sums may be added in another order."""
    give_training(t, 4)
    for name, tensor in ranks_of(4, "train_more")[0].items():
        t.expect(name, tensor, atol=1e-6 * tensor.abs().max().item())


@case
def ddp_mixed_precision(t):
    """Parameters in float32 during fifty steps whose passes are in bfloat16 or float16, and their sums in either."""
    from ddp_rank import MIXED

    give_training(t, 2)
    t.tell("ways", list(MIXED))
    for name, tensor in ranks_of(2, "train_mixed")[0].items():
        t.expect(name, tensor)


@case
def ddp_beside_python(t):
    """The same gradients in a group of one Rust rank and one Python rank."""
    give_training(t, 2)
    t.tell("python", sys.executable)
    t.tell("rank", str(RANK))
    for name, tensor in ranks_of(2, "one_step")[0].items():
        t.expect(name, tensor)


@case
def ddp_collectives(t):
    """Every collective's result on both ranks."""
    from ddp_rank import inputs, ops_of

    t.tell("kinds", list(inputs(0)))
    for rank in range(2):
        for name, tensor in inputs(rank).items():
            t.give(f"{name}.{rank}", tensor)
            t.tell(f"{name}.ops", ops_of(tensor))
    for rank, results in enumerate(ranks_of(2, "collectives")):
        for name, tensor in results.items():
            t.expect(f"{name}.{rank}", tensor)
