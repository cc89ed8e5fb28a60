"""Light models compared on one task: time, memory and accuracy of ResNet-18, MobileNetV2 and EfficientNet-B0."""

import resource
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from shipped import Digits
from torchvision import models

# Model


class OnDigits(nn.Module):
    """A model of color photographs, given gray digits."""

    def __init__(self, name):
        super().__init__()
        self.model = getattr(models, name)(num_classes=10)

    def forward(self, x):
        return self.model(F.interpolate(x.expand(-1, 3, -1, -1), size=(56, 56)))


# Data

train_loader = torch.utils.data.DataLoader(Digits("train", 640), batch_size=32, shuffle=True)
test_loader = torch.utils.data.DataLoader(Digits("t10k", 200), batch_size=100)

# Training


def train(model, device):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=len(train_loader))
    model.train()
    for images, target in train_loader:
        loss = F.cross_entropy(model(images.to(device)), target.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        print(f"loss {loss.item()}")


def test(model, device):
    model.eval()
    with torch.no_grad():
        right = [model(images.to(device)).argmax(1).eq(target.to(device)) for images, target in test_loader]
    return torch.cat(right).float().mean().item()


def main():
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in ("resnet18", "mobilenet_v2", "efficientnet_b0"):
        torch.manual_seed(0)
        model = OnDigits(name).to(device)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        start = time.time()
        train(model, device)
        seconds = time.time() - start
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        accuracy = 100 * test(model, device)
        print(f"{name}: {parameters / 1e6:.1f} M parameters, {seconds:.1f} s, {peak:.0f} MiB, {accuracy:.1f}%")


if __name__ == "__main__":
    main()
