"""The collectives and products of PyTorch's DDP, in the order in which they are issued: beside buckets.rs."""

import ctypes
import datetime
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

rank, size, file, steps, cases = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), sys.argv[5:]

runtime = ctypes.CDLL("libcudart.so.13")
runtime.fakecuda_issued.restype = ctypes.c_char_p
runtime.fakecuda_keep_order.argtypes = [ctypes.c_bool]
ctypes.CDLL(os.environ["FAKECUDA_OPERATORS"])
torch.set_num_threads(1)
torch.cuda.set_device(rank)
dist.init_process_group(
    "nccl", init_method=f"file://{file}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=300)
)


def issued():
    lines = runtime.fakecuda_issued().decode().splitlines()
    return ["product" if line.startswith("cublas") else line for line in lines if line.startswith(("cublas", "nccl "))]


for number, case in enumerate(cases):
    cap, unused, view = case.split(":")
    widths = [32, 512, 1024, 512, 8]
    layers = [layer for pair in zip(widths, widths[1:]) for layer in (nn.Linear(*pair), nn.ReLU())]
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(*layers[:-1]).cuda(),
        device_ids=[rank],
        bucket_cap_mb=None if cap == "default" else float(cap),
        find_unused_parameters=unused == "unused",
        gradient_as_bucket_view=view == "view",
    )
    for step in range(steps):
        model.zero_grad(set_to_none=view != "view")
        inputs = torch.ones(4, 32, device="cuda")
        torch.cuda.synchronize()
        runtime.fakecuda_keep_order(True)
        issued()
        model(inputs).square().mean().backward()
        print(f"order {number} {step} {';'.join(issued())}", flush=True)
        runtime.fakecuda_keep_order(False)
    del model
dist.destroy_process_group()
