"""PyTorch's examples/imagenet in small: a model by its name, meters, top-k accuracy, resume and the best checkpoint."""

import argparse
import pathlib
import shutil
import time

import torch
import torch.nn as nn
import torchvision.models as models
from safetensors.torch import load_file
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

# Model


def make_model(arch, num_classes):
    return models.__dict__[arch](num_classes=num_classes)


# Data


def loaders(args):
    data = load_file(args.data)
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    train = TensorDataset((data["train.images"] / 255 - mean) / std, data["train.labels"])
    val = TensorDataset((data["val.images"] / 255 - mean) / std, data["val.labels"])
    return DataLoader(train, args.batch_size, shuffle=True), DataLoader(val, args.batch_size)


# Training


class AverageMeter:
    def __init__(self, name, fmt):
        self.name = name
        self.fmt = fmt
        self.val = 0
        self.sum = 0
        self.count = 0

    def update(self, val, n=1):
        self.val = val
        self.sum += val * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(self.count, 1)

    def __str__(self):
        return f"{self.name} {self.val:{self.fmt}} ({self.avg:{self.fmt}})"


class ProgressMeter:
    def __init__(self, num_batches, meters, prefix):
        self.num_batches = num_batches
        self.meters = meters
        self.prefix = prefix

    def display(self, batch):
        print("\t".join([f"{self.prefix}[{batch}/{self.num_batches}]"] + [str(meter) for meter in self.meters]))


def accuracy(output, target, topk):
    with torch.no_grad():
        _, pred = output.topk(max(topk), 1, True, True)
        correct = pred.t().eq(target.view(1, -1))
        return [correct[:k].reshape(-1).float().sum() * (100.0 / target.size(0)) for k in topk]


def train(train_loader, model, criterion, optimizer, epoch, device):
    batch_time = AverageMeter("Time", "6.3f")
    data_time = AverageMeter("Data", "6.3f")
    losses = AverageMeter("Loss", ".4f")
    top1 = AverageMeter("Acc@1", "6.2f")
    top5 = AverageMeter("Acc@5", "6.2f")
    progress = ProgressMeter(len(train_loader), [batch_time, data_time, losses, top1, top5], f"Epoch: [{epoch}]")
    model.train()
    end = time.time()
    for i, (images, target) in enumerate(train_loader):
        data_time.update(time.time() - end)
        images, target = images.to(device), target.to(device)
        output = model(images)
        loss = criterion(output, target)
        acc1, acc5 = accuracy(output, target, topk=(1, 5))
        losses.update(loss.item(), images.size(0))
        top1.update(acc1.item(), images.size(0))
        top5.update(acc5.item(), images.size(0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        batch_time.update(time.time() - end)
        end = time.time()
        progress.display(i + 1)
        print(f"loss {losses.val}")


def validate(val_loader, model, criterion, device):
    losses = AverageMeter("Loss", ".4f")
    top1 = AverageMeter("Acc@1", "6.2f")
    top5 = AverageMeter("Acc@5", "6.2f")
    model.eval()
    with torch.no_grad():
        for images, target in val_loader:
            images, target = images.to(device), target.to(device)
            output = model(images)
            loss = criterion(output, target)
            acc1, acc5 = accuracy(output, target, topk=(1, 5))
            losses.update(loss.item(), images.size(0))
            top1.update(acc1.item(), images.size(0))
            top5.update(acc5.item(), images.size(0))
    print(f" * Acc@1 {top1.avg:.3f} Acc@5 {top5.avg:.3f} loss {losses.avg}")
    return top1.avg


def save_checkpoint(state, is_best, folder):
    torch.save(state, folder / "checkpoint.pth.tar")
    if is_best:
        shutil.copyfile(folder / "checkpoint.pth.tar", folder / "model_best.pth.tar")


def main():
    parser = argparse.ArgumentParser(description="PyTorch's ImageNet example, in small")
    parser.add_argument("--data", default="images.safetensors")
    parser.add_argument("--arch", default="resnet18")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.02)
    parser.add_argument("--momentum", type=float, default=0.9)
    parser.add_argument("--weight-decay", type=float, default=1e-4)
    parser.add_argument("--classes", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--checkpoints", type=pathlib.Path, default=pathlib.Path("."))
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    train_loader, val_loader = loaders(args)
    model = make_model(args.arch, args.classes).to(device)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(
        model.parameters(), args.lr, momentum=args.momentum, weight_decay=args.weight_decay, fused=True
    )
    scheduler = StepLR(optimizer, step_size=30, gamma=0.1)
    start_epoch, best_acc1 = 0, 0.0
    if args.resume:
        checkpoint = torch.load(args.checkpoints / "checkpoint.pth.tar", map_location=device)
        start_epoch = checkpoint["epoch"]
        best_acc1 = checkpoint["best_acc1"]
        model.load_state_dict(checkpoint["state_dict"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        scheduler.load_state_dict(checkpoint["scheduler"])
    for epoch in range(start_epoch, args.epochs):
        train(train_loader, model, criterion, optimizer, epoch, device)
        acc1 = validate(val_loader, model, criterion, device)
        scheduler.step()
        is_best = acc1 > best_acc1
        best_acc1 = max(acc1, best_acc1)
        state = {"epoch": epoch + 1, "state_dict": model.state_dict(), "best_acc1": best_acc1}
        state |= {"optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
        save_checkpoint(state, is_best, args.checkpoints)


if __name__ == "__main__":
    main()
