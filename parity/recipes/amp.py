"""PyTorch's automatic mixed precision recipe: autocast, GradScaler, clipping and a saved scaler."""

import torch
import torch.nn as nn

# Model


def make_model(in_size, out_size, num_layers):
    layers = []
    for _ in range(num_layers - 1):
        layers.append(nn.Linear(in_size, in_size))
        layers.append(nn.ReLU())
    layers.append(nn.Linear(in_size, out_size))
    return nn.Sequential(*layers)


# Data

batch_size, in_size, out_size, num_layers, num_batches = 64, 256, 16, 3, 10


def batches(device):
    data = [torch.randn(batch_size, in_size, device=device) for _ in range(num_batches)]
    targets = [torch.randn(batch_size, out_size, device=device) for _ in range(num_batches)]
    return list(zip(data, targets))


# Training

epochs = 3


def main():
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.float16 if device == "cuda" else torch.bfloat16
    data = batches(device)
    loss_fn = nn.MSELoss()

    net = make_model(in_size, out_size, num_layers).to(device)
    opt = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9, fused=True)
    scaler = torch.amp.GradScaler(device)
    for epoch in range(epochs):
        for input, target in data:
            with torch.autocast(device_type=device, dtype=dtype):
                output = net(input)
                loss = loss_fn(output, target)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.1)
            scaler.step(opt)
            scaler.update()
            opt.zero_grad()
            print(f"epoch {epoch}: loss {loss.item()}")

    checkpoint = {"model": net.state_dict(), "optimizer": opt.state_dict(), "scaler": scaler.state_dict()}
    net.load_state_dict(checkpoint["model"])
    opt.load_state_dict(checkpoint["optimizer"])
    scaler.load_state_dict(checkpoint["scaler"])


if __name__ == "__main__":
    main()
