"""A PyTorch rank in `versus ddp`. Answers each line `MODEL_WHAT STEPS` with seconds or, for `hidden`, with a share."""

import contextlib
import sys
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

BATCH = 32


class Cnn(torch.nn.Module):
    """The benches' CNN for 28x28 grey images, 105,866 parameters."""

    def __init__(self):
        super().__init__()
        self.conv1 = torch.nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = torch.nn.Conv2d(16, 32, 3, padding=1)
        self.fc1 = torch.nn.Linear(32 * 7 * 7, 64)
        self.fc2 = torch.nn.Linear(64, 10)

    def forward(self, images):
        x = torch.nn.functional.max_pool2d(self.conv1(images).relu(), 2)
        x = torch.nn.functional.max_pool2d(self.conv2(x).relu(), 2)
        return self.fc2(self.fc1(x.flatten(1)).relu())


def mlp():
    """10.0 million parameters."""
    widths = [784, 2048, 2048, 2048, 10]
    layers = []
    for inputs, outputs in zip(widths, widths[1:]):
        layers += [torch.nn.Linear(inputs, outputs), torch.nn.ReLU()]
    return torch.nn.Sequential(*layers[:-1])


class Training:
    """A model, its batch and its optimizer."""

    def __init__(self, model, shape, **options):
        self.ddp = DistributedDataParallel(model)
        self.opt = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
        self.inputs, self.targets = torch.randn(shape), torch.randint(0, 10, (BATCH,))
        self.loss = torch.nn.CrossEntropyLoss()
        for _ in range(4):
            self.step()

    def step(self):
        self.opt.zero_grad()
        self.loss(self.ddp(self.inputs), self.targets).backward()
        self.opt.step()

    def seconds(self, steps, local):
        started = time.perf_counter()
        with self.ddp.no_sync() if local else contextlib.nullcontext():
            for _ in range(steps):
                self.step()
        return time.perf_counter() - started

    def sums(self, steps):
        number = torch.tensor(1.0)
        started = time.perf_counter()
        for _ in range(steps):
            dist.all_reduce(number, dist.ReduceOp.MAX)
        return time.perf_counter() - started

    def overlap(self, steps):
        """The seconds of communication, and how many of them overlap with backward, as libtorch measures them."""
        self.ddp._set_ddp_runtime_logging_sample_rate(1)
        communication = overlap = 0
        for _ in range(steps):
            self.step()
            self.ddp(self.inputs)  # DDP writes the times of a step at the next forward
            data = self.ddp._get_ddp_logging_data()
            communication += data["backward_comm_time"]
            overlap += data["backward_compute_comm_overlap_time"]
        self.ddp._set_ddp_runtime_logging_sample_rate(100)
        return communication * 1e-9, overlap * 1e-9


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    print(torch.__version__, flush=True)
    models = {"cnn": (Cnn, (BATCH, 1, 28, 28)), "mlp": (mlp, (BATCH, 784))}
    trainings = {}
    for line in sys.stdin:
        name, steps = line.split()
        model, what = name.split("_")
        if model not in trainings:
            make, shape = models[model]
            trainings[model] = Training(make(), shape, fused=True)
        training = trainings[model]
        dist.barrier()
        if what in ("hidden", "overlap"):
            communication, overlap = training.overlap(int(steps))
            answer = overlap / communication if what == "hidden" else overlap / int(steps)
        else:
            answer = training.sums(int(steps)) if what == "sum" else training.seconds(int(steps), what == "local")
        print(answer, flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
