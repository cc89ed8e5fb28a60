"""PyTorch's half of `pytorch.rs`: trains from scratch or from a file, and prints the final state.

    pytorch.py start FOLDER STEPS     trains from scratch and saves the .pt files
    pytorch.py resume FOLDER STEPS    continues from run.pt
    pytorch.py go_on FOLDER STEPS     continues from the files of `start`
    pytorch.py there_and_back FOLDER STEPS    converts all optimizers and schedules to a checkpoint and back
"""

import contextlib
import json
import os
import pathlib
import runpy
import sys

import torch
import torch.optim.lr_scheduler as schedulers

EXPORTER = pathlib.Path(__file__).resolve().parents[4] / "docs/export_pt.py"

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
            # Gradients that depend on the weights, so that a wrong step shows up later.
            loss = sum((p * torch.sin(p.detach() * 3.0 + step)).sum() for p in self.model.parameters())
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            self.scheduler.step()

    def report(self):
        json.dump({
            "weights": {name: param.flatten().tolist() for name, param in self.model.named_parameters()},
            "lrs": [group["lr"] for group in self.optimizer.param_groups],
            "initial_lrs": [group["initial_lr"] for group in self.optimizer.param_groups],
            "scale": self.scaler.get_scale(),
            "last_epoch": self.scheduler.last_epoch,
        }, sys.stdout)  # fmt: skip


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, 0.1, momentum=0.9, nesterov=True),
    "adam": lambda params: torch.optim.Adam(params, lr=0.02, amsgrad=True),
    "rmsprop": lambda params: torch.optim.RMSprop(params, lr=0.02, centered=True, momentum=1),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "asgd": lambda params: torch.optim.ASGD(params, 0.1, lambd=0.1, t0=2),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.02),
    "rprop": lambda params: torch.optim.Rprop(params, lr=0.02),
    "adafactor": lambda params: torch.optim.Adafactor(params, lr=0.1),
}
SCHEDULES = {
    "plateau": lambda opt: schedulers.ReduceLROnPlateau(opt, patience=1),
    "cosine": lambda opt: schedulers.CosineAnnealingLR(opt, 20),
    "sequential": lambda opt: schedulers.SequentialLR(opt, [schedulers.LinearLR(opt), schedulers.StepLR(opt, 3)], [3]),
    "chained": lambda opt: schedulers.ChainedScheduler([schedulers.LinearLR(opt), schedulers.ExponentialLR(opt, 0.9)]),
    "one_cycle": lambda opt: schedulers.OneCycleLR(opt, 0.1, total_steps=20),
}


def there_and_back(folder, steps):
    export = runpy.run_path(str(EXPORTER))["main"]

    def make(optimizer, schedule):
        torch.manual_seed(0)
        model = torch.nn.Linear(4, 3)
        optimizer = OPTIMIZERS[optimizer](list(model.parameters()))
        return {"model": model, "optimizer": optimizer, "scheduler": SCHEDULES[schedule](optimizer)}

    def train(run, first):
        for step in range(first, first + steps):
            for param in run["model"].parameters():
                param.grad = torch.sin(param.detach() * 3.0 + step)
            run["optimizer"].step()
            run["scheduler"].step(*([1.0] if isinstance(run["scheduler"], schedulers.ReduceLROnPlateau) else []))

    for names in [(optimizer, schedule) for optimizer in OPTIMIZERS for schedule in SCHEDULES]:
        if names[0] in ("adafactor", "adagrad", "asgd", "rprop") and names[1] == "one_cycle":
            # These optimizers have no momentum to cycle.
            continue
        there, back = make(*names), make(*names)
        train(there, 0)
        arguments = []
        for name, value in there.items():
            torch.save(value.state_dict(), os.path.join(folder, f"{name}.pt"))
            arguments += [f"--{name}", os.path.join(folder, f"{name}.pt")]
        checkpoint = os.path.join(folder, "-".join(names))
        export([*arguments, "--step", str(steps), checkpoint])
        export(["--to-pt", checkpoint + ".pt", checkpoint])
        saved = torch.load(checkpoint + ".pt", weights_only=True)
        if names[1] in ("sequential", "chained"):
            for _ in range(saved["scheduler"]["last_epoch"]):
                back["scheduler"].step()
        else:
            back["scheduler"].load_state_dict(saved["scheduler"])
        back["optimizer"].load_state_dict(saved["optimizer"])
        back["model"].load_state_dict(saved["model"])
        train(there, steps)
        train(back, steps)
        assert torch.equal(there["model"].weight, back["model"].weight), names
        rates = [[group["lr"] for group in run["optimizer"].param_groups] for run in (there, back)]
        assert rates[0] == rates[1], (names, rates)


def main():
    what, folder, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if what == "there_and_back":
        with contextlib.redirect_stdout(sys.stderr):
            there_and_back(folder, steps)
        return json.dump({}, sys.stdout)
    run = Run()
    if what == "start":
        run.train(0, steps)
        for name in FILES:
            torch.save(getattr(run, name).state_dict(), os.path.join(folder, f"{name}.pt"))
        plateau = schedulers.ReduceLROnPlateau(run.optimizer, patience=1)
        for metric in (2.0, 3.0, 3.0, 3.0):
            plateau.step(metric)
        torch.save(plateau.state_dict(), os.path.join(folder, "plateau.pt"))
    elif what == "go_on":
        for name in FILES:
            getattr(run, name).load_state_dict(torch.load(os.path.join(folder, f"{name}.pt"), weights_only=True))
        run.train(run.scheduler.last_epoch, steps)
    else:
        saved = torch.load(os.path.join(folder, "run.pt"), weights_only=True)
        for name in FILES:
            getattr(run, name).load_state_dict(saved[name])
        # A new schedule over a resumed optimizer needs `initial_lr` in its groups.
        fresh = torch.optim.lr_scheduler.StepLR(run.optimizer, 3, gamma=0.5, last_epoch=saved["step"] - 1)
        assert fresh.base_lrs == run.scheduler.base_lrs, (fresh.base_lrs, run.scheduler.base_lrs)
        # Making it has stepped it once, which changed the rates.
        run.optimizer.load_state_dict(saved["optimizer"])
        run.train(saved["step"], steps)
    run.report()


main()
