"""PyTorch's half of `pytorch.rs`: trains from a start or from a file, and says where it came to.

    pytorch.py start FOLDER STEPS     makes the .pt files of a run of so many steps
    pytorch.py resume FOLDER STEPS    goes on from run.pt
    pytorch.py go_on FOLDER STEPS     goes on from the files that `start` has made
"""

import json
import os
import sys

import torch

FILES = ("model", "optimizer", "scaler", "scheduler")


class Run:
    def __init__(self):
        self.model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 4))
        with torch.no_grad():
            for place, param in enumerate(self.model.parameters()):
                param.copy_(torch.sin(torch.arange(param.numel()) * 0.1 + place).reshape(param.shape))
        params = list(self.model.parameters())
        groups = [{"params": params[:2], "lr": 0.01, "betas": (0.8, 0.9)}, {"params": params[2:], "weight_decay": 0.1}]
        self.optimizer = torch.optim.AdamW(groups, lr=0.02)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5)

    def train(self, first, steps):
        for step in range(first, first + steps):
            # Gradients that depend on the weights, so that every step counts.
            loss = sum((p * torch.sin(p.detach() * 3.0 + step)).sum() for p in self.model.parameters())
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def say(self):
        json.dump({
            "weights": {name: param.flatten().tolist() for name, param in self.model.named_parameters()},
            "lrs": [group["lr"] for group in self.optimizer.param_groups],
            "initial_lrs": [group["initial_lr"] for group in self.optimizer.param_groups],
            "scale": self.scaler.get_scale(),
            "last_epoch": self.scheduler.last_epoch,
        }, sys.stdout)  # fmt: skip


def main():
    what, folder, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    run = Run()
    if what == "start":
        run.train(0, steps)
        for name in FILES:
            torch.save(getattr(run, name).state_dict(), os.path.join(folder, f"{name}.pt"))
    elif what == "go_on":
        for name in FILES:
            getattr(run, name).load_state_dict(torch.load(os.path.join(folder, f"{name}.pt"), weights_only=True))
        run.train(run.scheduler.last_epoch, steps)
    else:
        saved = torch.load(os.path.join(folder, "run.pt"), weights_only=True)
        for name in FILES:
            getattr(run, name).load_state_dict(saved[name])
        # One that is made anew over the optimizer wants `initial_lr` of it.
        anew = torch.optim.lr_scheduler.StepLR(run.optimizer, 3, gamma=0.5, last_epoch=saved["step"] - 1)
        assert anew.base_lrs == run.scheduler.base_lrs, (anew.base_lrs, run.scheduler.base_lrs)
        # It has stepped once when it was made.
        run.optimizer.load_state_dict(saved["optimizer"])
        run.train(saved["step"], steps)
    run.say()


main()
