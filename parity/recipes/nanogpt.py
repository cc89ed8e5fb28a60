"""nanoGPT's train.py on the shipped play: groups, a cosine, clipping, accumulation, data-parallel ranks and resume.

Run alone, or with `torchrun --nproc-per-node 2`. Unlike the original, it resumes exactly: a batch is drawn when it is used
and not one ahead, and the checkpoint, with the generator's state, is written before the evaluation draws from it.
"""

import math
import os
import pathlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from shipped import hamlet
from torch.nn.parallel import DistributedDataParallel

# Model


@dataclass
class GPTConfig:
    block_size: int = 64
    vocab_size: int = 128
    n_layer: int = 3
    n_head: int = 4
    n_embd: int = 96
    dropout: float = 0.1
    bias: bool = False


class CausalSelfAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_attn = nn.Linear(config.n_embd, 3 * config.n_embd, bias=config.bias)
        self.c_proj = nn.Linear(config.n_embd, config.n_embd, bias=config.bias)
        self.resid_dropout = nn.Dropout(config.dropout)
        self.n_head = config.n_head
        self.dropout = config.dropout

    def forward(self, x):
        B, T, C = x.size()
        q, k, v = self.c_attn(x).split(C, dim=2)
        q, k, v = (each.view(B, T, self.n_head, C // self.n_head).transpose(1, 2) for each in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).contiguous().view(B, T, C)
        return self.resid_dropout(self.c_proj(y))


class MLP(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.c_fc = nn.Linear(config.n_embd, 4 * config.n_embd, bias=config.bias)
        self.gelu = nn.GELU()
        self.c_proj = nn.Linear(4 * config.n_embd, config.n_embd, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x):
        return self.dropout(self.c_proj(self.gelu(self.c_fc(x))))


class Block(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.attn = CausalSelfAttention(config)
        self.ln_2 = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.mlp = MLP(config)

    def forward(self, x):
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)
        self.drop = nn.Dropout(config.dropout)
        self.h = nn.ModuleList([Block(config) for _ in range(config.n_layer)])
        self.ln_f = nn.LayerNorm(config.n_embd, bias=config.bias)
        self.lm_head = nn.Linear(config.n_embd, config.vocab_size, bias=False)
        self.wte.weight = self.lm_head.weight
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("c_proj.weight"):
                torch.nn.init.normal_(parameter, mean=0.0, std=0.02 / math.sqrt(2 * config.n_layer))

    def _init_weights(self, module):
        if isinstance(module, nn.Linear):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)
        elif isinstance(module, nn.Embedding):
            torch.nn.init.normal_(module.weight, mean=0.0, std=0.02)

    def forward(self, idx, targets):
        pos = torch.arange(idx.size(1), device=idx.device)
        x = self.drop(self.wte(idx) + self.wpe(pos))
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return F.cross_entropy(logits.view(-1, logits.size(-1)), targets.view(-1))


# Data

data = torch.tensor([min(ord(c), 127) for c in hamlet()])
train_data, val_data = data[: len(data) * 9 // 10], data[len(data) * 9 // 10 :]


def get_batch(data, config, batch_size, device):
    ix = torch.randint(len(data) - config.block_size, (batch_size,))
    x = torch.stack([data[i : i + config.block_size] for i in ix])
    y = torch.stack([data[i + 1 : i + 1 + config.block_size] for i in ix])
    return x.to(device), y.to(device)


# Training

out_dir = pathlib.Path(os.environ.get("OUT_DIR", "out"))
eval_interval, eval_iters = 25, 4
batch_size = 8
gradient_accumulation_steps = 4
learning_rate, min_lr = 1e-3, 1e-4
max_iters, lr_decay_iters, warmup_iters = 50, 50, 5
weight_decay = 1e-1
beta1, beta2 = 0.9, 0.95
grad_clip = 1.0


def get_lr(it):
    if it < warmup_iters:
        return learning_rate * (it + 1) / (warmup_iters + 1)
    if it > lr_decay_iters:
        return min_lr
    decay_ratio = (it - warmup_iters) / (lr_decay_iters - warmup_iters)
    coeff = 0.5 * (1.0 + math.cos(math.pi * decay_ratio))
    return min_lr + coeff * (learning_rate - min_lr)


@torch.no_grad()
def estimate_loss(model, config, device):
    model.eval()
    losses = {}
    for split, data in (("train", train_data), ("val", val_data)):
        batches = [get_batch(data, config, batch_size, device) for _ in range(eval_iters)]
        losses[split] = sum(model(x, y).item() for x, y in batches) / eval_iters
    model.train()
    return losses


def configure_optimizers(model):
    decay = [p for p in model.parameters() if p.dim() >= 2]
    nodecay = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": decay, "weight_decay": weight_decay}, {"params": nodecay, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=learning_rate, betas=(beta1, beta2), fused=True)


def main():
    ddp = "RANK" in os.environ
    rank, accumulation = 0, gradient_accumulation_steps
    if ddp:
        dist.init_process_group("gloo")
        rank, world_size = dist.get_rank(), dist.get_world_size()
        accumulation //= world_size
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(1337 + rank)

    config = GPTConfig()
    raw_model = model = GPT(config).to(device)
    optimizer = configure_optimizers(model)
    iter_num = 0
    if (out_dir / "ckpt.pt").exists():
        checkpoint = torch.load(out_dir / "ckpt.pt", map_location=device)
        raw_model.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        if rank == 0:
            torch.set_rng_state(checkpoint["rng"])
        iter_num = checkpoint["iter_num"]
    if ddp:
        model = DistributedDataParallel(model)

    while iter_num < max_iters:
        lr = get_lr(iter_num)
        for param_group in optimizer.param_groups:
            param_group["lr"] = lr
        if iter_num % eval_interval == 0 and rank == 0:
            if iter_num > 0:
                state = {"model": raw_model.state_dict(), "optimizer": optimizer.state_dict(), "iter_num": iter_num}
                torch.save(state | {"rng": torch.get_rng_state()}, out_dir / "ckpt.pt")
            losses = estimate_loss(raw_model, config, device)
            print(f"step {iter_num}: train loss {losses['train']}, val loss {losses['val']}")
        for micro_step in range(accumulation):
            if ddp:
                model.require_backward_grad_sync = micro_step == accumulation - 1
            X, Y = get_batch(train_data, config, batch_size, device)
            loss = model(X, Y) / accumulation
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if rank == 0:
            print(f"iter {iter_num}: loss {loss.item() * accumulation}, lr {lr:.2e}")
        iter_num += 1
    if ddp:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
