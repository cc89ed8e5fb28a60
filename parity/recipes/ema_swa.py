"""Averages of weights: an exponential moving average, and stochastic weight averaging with its batch norm update."""

import torch
import torch.nn as nn
import torch.nn.functional as F
from shipped import Digits
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn, update_bn

# Model


def make_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(1568, 10),
    )


# Data

train_loader = torch.utils.data.DataLoader(Digits("train", 1024), batch_size=64, shuffle=True)
test_loader = torch.utils.data.DataLoader(Digits("t10k", 500), batch_size=250)

# Training

epochs = 4
swa_start = 2


def test(name, model):
    model.eval()
    loss, correct = 0, 0
    with torch.no_grad():
        for x, y in test_loader:
            output = model(x)
            loss += F.cross_entropy(output, y).item()
            correct += output.argmax(1).eq(y).sum().item()
    print(f"{name}: test loss {loss / len(test_loader)}, {correct} of {len(test_loader.dataset)} right")


def main():
    torch.manual_seed(0)
    model = make_model()
    ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
    swa_model = AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4, fused=True)
    scheduler = CosineAnnealingLR(optimizer, T_max=epochs)
    swa_scheduler = SWALR(optimizer, swa_lr=0.02, anneal_epochs=2)
    for epoch in range(epochs):
        model.train()
        for input, target in train_loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(input), target)
            loss.backward()
            optimizer.step()
            ema_model.update_parameters(model)
            print(f"epoch {epoch}: loss {loss.item()}")
        if epoch >= swa_start:
            swa_model.update_parameters(model)
            swa_scheduler.step()
        else:
            scheduler.step()

    update_bn(train_loader, swa_model)
    update_bn(train_loader, ema_model)
    test("model", model)
    test("EMA", ema_model)
    test("SWA", swa_model)


if __name__ == "__main__":
    main()
