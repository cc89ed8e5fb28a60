"""A rank that takes part in one all-reduce and ends. Rank 0 prints when it is done."""

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.tensor(dist.get_rank())
dist.all_reduce(total)
assert total.item() == 6, total
if dist.get_rank() == 0:
    print("the first sum is there", flush=True)
dist.barrier()
dist.destroy_process_group()
