"""A physics-informed network: Burgers' equation u_t + u u_x = nu u_xx, by Adam, then L-BFGS."""

import math

import torch
import torch.nn as nn
from torch.autograd import grad

# Model


class Net(nn.Module):
    def __init__(self, width, depth):
        super().__init__()
        layers = [nn.Linear(2, width), nn.Tanh()]
        for _ in range(depth - 1):
            layers += [nn.Linear(width, width), nn.Tanh()]
        self.layers = nn.Sequential(*layers, nn.Linear(width, 1))
        for layer in self.layers:
            if isinstance(layer, nn.Linear):
                nn.init.xavier_normal_(layer.weight)
                nn.init.zeros_(layer.bias)

    def forward(self, x, t):
        return self.layers(torch.cat([x, t], dim=1))


# Data


def points(count):
    x = torch.rand(count, 1) * 2 - 1
    t = torch.rand(count, 1)
    return torch.utils.data.TensorDataset(x, t)


# Training

nu = 0.01 / math.pi
adam_epochs, lbfgs_steps = 2, 5


def residual(net, x, t):
    x, t = x.requires_grad_(), t.requires_grad_()
    u = net(x, t)
    ones = torch.ones_like(u)
    u_x, u_t = grad(u, (x, t), ones, create_graph=True)
    (u_xx,) = grad(u_x, x, ones, create_graph=True)
    return u_t + u * u_x - nu * u_xx


def loss_of(net, x, t, x0, edge, t_edge):
    physics = residual(net, x, t).square().mean()
    start = (net(x0, torch.zeros_like(x0)) + torch.sin(math.pi * x0)).square().mean()
    edges = net(edge, t_edge).square().mean()
    return physics + start + edges


def main():
    torch.manual_seed(0)
    net = Net(20, 4)
    loader = torch.utils.data.DataLoader(points(2000), batch_size=200, shuffle=True)
    x0 = torch.linspace(-1, 1, 100).unsqueeze(1)
    edge = torch.cat([torch.full((50, 1), -1.0), torch.ones(50, 1)])
    t_edge = torch.linspace(0, 1, 50).repeat(2).unsqueeze(1)

    adam = torch.optim.Adam(net.parameters(), lr=1e-3, fused=True)
    for epoch in range(adam_epochs):
        for x, t in loader:
            adam.zero_grad()
            loss = loss_of(net, x, t, x0, edge, t_edge)
            loss.backward()
            adam.step()
            print(f"Adam, epoch {epoch}: loss {loss.item()}")

    lbfgs = torch.optim.LBFGS(net.parameters(), max_iter=5, history_size=10, line_search_fn="strong_wolfe")
    x, t = loader.dataset.tensors

    def closure():
        lbfgs.zero_grad()
        loss = loss_of(net, x, t, x0, edge, t_edge)
        loss.backward()
        return loss

    for step in range(lbfgs_steps):
        loss = lbfgs.step(closure)
        print(f"L-BFGS, step {step}: loss {loss.item()}")


if __name__ == "__main__":
    main()
