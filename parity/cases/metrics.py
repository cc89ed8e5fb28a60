"""Meters of PyTorch's ImageNet example, which is rewritten here from what its meters print and count."""

import torch
from harness import case
from torch.nn.functional import cross_entropy


def accuracy(output, target, topk):
    """For each k, the percentage of targets among the k largest outputs."""
    _, predicted = output.topk(max(topk), 1, True, True)
    correct = predicted.t().eq(target.view(1, -1))
    return [correct[:k].reshape(-1).float().sum(0, keepdim=True).mul_(100.0 / len(target)) for k in topk]


class AverageMeter:
    def __init__(self, name, spec, summary):
        self.name, self.spec, self.shown = name, spec, summary
        self.val = self.sum = self.count = self.avg = 0

    def update(self, val, n):
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count

    def __str__(self):
        return f"{self.name} {format(self.val, self.spec)} ({format(self.avg, self.spec)})"

    def summary(self):
        return "" if self.shown is None else f"{self.name} {getattr(self, self.shown):.3f}"


def text(line):
    return torch.tensor(list(line.encode()), dtype=torch.uint8)


@case
def metrics_meters(t):
    """Accuracies and losses of 12 batches of different sizes, and the lines that are printed."""
    sizes = [16, 16, 7, 1, 33, 16, 16, 16, 2, 5, 64, 3]
    t.tell("sizes", sizes)
    losses, top1 = AverageMeter("Loss", ".4e", "avg"), AverageMeter("Acc@1", "6.2f", "avg")
    top5, seen = AverageMeter("Acc@5", "6.2f", "sum"), AverageMeter("Time", "6.3f", None)
    for number, size in enumerate(sizes):
        output = t.give(f"output.{number}", torch.randn(size, 20) * 3)
        target = t.give(f"target.{number}", torch.randint(0, 20, (size,)))
        loss = cross_entropy(output, target)
        acc1, acc5 = accuracy(output, target, (1, 5))
        t.expect(f"{number}.acc1", acc1)
        t.expect(f"{number}.acc5", acc5)
        losses.update(loss.item(), size)
        top1.update(acc1[0].item(), size)
        top5.update(acc5[0].item(), size)
        seen.update(0.125 * number * number, 1)
        meters = [seen, losses, top1, top5]
        t.expect(f"{number}.sum", torch.tensor([meter.sum for meter in meters], dtype=torch.float64))
        t.expect(f"{number}.avg", torch.tensor([meter.avg for meter in meters], dtype=torch.float64))
        line = "\t".join([f"Epoch: [1][{number + 1:4d}/1250]"] + [str(meter) for meter in meters])
        t.expect(f"{number}.line", text(line))
    t.expect("summary", text(" ".join([" *"] + [meter.summary() for meter in meters])))
