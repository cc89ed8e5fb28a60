"""Two ranks of PyTorch over Gloo, whose results two ranks of ours must find bit for bit."""

import os
import pathlib
import socket
import subprocess
import sys
import tempfile

import torch
from harness import case

RANK = pathlib.Path(__file__).with_name("ddp_rank.py")


def two_ranks(job):
    """Runs `ddp_rank.py` twice and returns what each rank saved."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(2):
            env = dict(os.environ, RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
            env.update(OMP_NUM_THREADS="1")
            command = [sys.executable, str(RANK), job, f"{folder}/{rank}.pt"]
            ranks.append(subprocess.Popen(command, env=env))
        codes = [rank.wait(timeout=300) for rank in ranks]
        assert codes == [0, 0], f"{job}: the ranks ended with {codes}"
        return [torch.load(f"{folder}/{rank}.pt") for rank in range(2)]


def give_training(t):
    from ddp_rank import batches, parameters

    for name, param in parameters().items():
        t.give(name, param)
    for rank in range(2):
        for step, (x, y) in enumerate(batches(rank)):
            t.give(f"x.{rank}.{step}", x)
            t.give(f"y.{rank}.{step}", y)


@case
def ddp_training(t):
    """Parameters behind each of five steps, in each way of bucketing gradients."""
    from ddp_rank import WAYS

    give_training(t)
    t.tell("ways", list(WAYS))
    for name, tensor in two_ranks("train")[0].items():
        t.expect(name, tensor)


@case
def ddp_beside_python(t):
    """The same gradients with one rank of ours beside one of Python's."""
    give_training(t)
    t.tell("python", sys.executable)
    t.tell("rank", str(RANK))
    for name, tensor in two_ranks("one_step")[0].items():
        t.expect(name, tensor)


@case
def ddp_collectives(t):
    """Every collective's result on both ranks."""
    from ddp_rank import inputs

    for rank in range(2):
        for name, tensor in inputs(rank).items():
            t.give(f"{name}.{rank}", tensor)
    for rank, results in enumerate(two_ranks("collectives")):
        for name, tensor in results.items():
            t.expect(f"{name}.{rank}", tensor)
