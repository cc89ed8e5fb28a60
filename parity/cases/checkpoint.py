"""PyTorch's `.pt` files exported by docs/export_pt.py: the run continues in Rust as it does here."""

import pathlib
import runpy
import sys

import torch
from harness import case

EXPORTER = pathlib.Path(__file__).resolve().parents[2] / "docs/export_pt.py"
# With parameter groups, and with options that are whole numbers in the file, such as a momentum of 1.
OPTIMIZERS = {
    "sgd": lambda a, b: torch.optim.SGD([{"params": a}, {"params": b, "weight_decay": 0.1}], 0.1, momentum=0.9, fused=True),
    "adam": lambda a, b: torch.optim.Adam(a + b, lr=0.02, amsgrad=True, fused=True),
    "adamw": lambda a, b: torch.optim.AdamW([{"params": a, "lr": 0.01}, {"params": b}], lr=0.02, fused=True),
    "rmsprop": lambda a, b: torch.optim.RMSprop(a + b, lr=0.02, centered=True, momentum=1, foreach=True),
    "adagrad": lambda a, b: torch.optim.Adagrad(a + b, lr=0.1, fused=True),
    "adafactor": lambda a, b: torch.optim.Adafactor(a + b, lr=0.1, foreach=True),
    "adadelta": lambda a, b: torch.optim.Adadelta(a + b, rho=0.8, foreach=True),
    "adamax": lambda a, b: torch.optim.Adamax(a + b, lr=0.02, foreach=True),
    "asgd": lambda a, b: torch.optim.ASGD(a + b, lr=0.1, lambd=0.1, t0=2, foreach=True),
    "nadam": lambda a, b: torch.optim.NAdam(a + b, lr=0.02, decoupled_weight_decay=True, foreach=True),
    "radam": lambda a, b: torch.optim.RAdam(a + b, lr=0.02, foreach=True),
    "rprop": lambda a, b: torch.optim.Rprop(a + b, lr=0.02, step_sizes=(1e-6, 1), foreach=True),
}


def train(model, optimizer, first, steps):
    """Steps with gradients that depend on the weights, so that every step affects the result."""
    for step in range(first, first + steps):
        for param in model.parameters():
            param.grad = torch.sin(param.detach() * 3.0 + step)
        optimizer.step()


@case
def export_pt(t):
    folders = {}
    export = runpy.run_path(str(EXPORTER))["main"]
    for name, make in OPTIMIZERS.items():
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8))
        params = list(model.parameters())
        optimizer = make(params[:2], params[2:])
        # A schedule adds its own options to the groups.
        sched = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        model(torch.randn(16, 6))
        for step in range(4):
            train(model, optimizer, step, 1)
            sched.step()
        # In a subfolder, because the other files in the harness's folder are cases.
        folder = pathlib.Path(sys.argv[1]) / "exported"
        folder.mkdir(exist_ok=True)
        torch.save({"epoch": 3, "model": model.state_dict()}, folder / f"{name}.model.pt")
        torch.save(optimizer.state_dict(), folder / f"{name}.optimizer.pt")
        folders[name] = str(folder / name)
        files = ["--model", folder / f"{name}.model.pt", "--model-key", "model"]
        files += ["--optimizer", folder / f"{name}.optimizer.pt"]
        export([str(word) for word in (*files, "--step", 4, folders[name])])
        train(model, optimizer, 4, 20)
        for key, value in model.state_dict().items():
            if not key.endswith("num_batches_tracked"):
                t.expect(f"{name}.{key}", value)
    t.tell("folders", folders)
