"""What each step of PyTorch's DDP counts, one line a step: beside steps.rs."""

import ctypes
import os
import sys

import torch
import torch.distributed as dist
from torch import nn

file, steps = sys.argv[1], int(sys.argv[2])

runtime = ctypes.CDLL("libcudart.so.13")
runtime.fakecuda_counts.restype = ctypes.c_char_p
ctypes.CDLL(os.environ["FAKECUDA_OPERATORS"])
torch.set_num_threads(1)
torch.cuda.set_device(0)
dist.init_process_group("nccl", init_method=f"file://{file}", rank=0, world_size=1)
model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
model = nn.parallel.DistributedDataParallel(model, device_ids=[0], bucket_cap_mb=0.005)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
inputs = torch.ones(4, 32, device="cuda")
for step in range(steps):
    runtime.fakecuda_reset()
    model(inputs).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    counts = runtime.fakecuda_counts().decode().splitlines()
    print("step", ";".join(line for line in counts if not line.startswith("kernel ")), flush=True)
dist.destroy_process_group()
