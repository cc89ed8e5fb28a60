"""Training steps compiled by `torch.compile`."""

import os
import shutil

import torch
from harness import case

COMPILER = os.environ.get("CXX", "g++")
if not shutil.which(COMPILER):
    raise ModuleNotFoundError("Inductor needs a C++ compiler", name="g++")
SIZES = [16] * 5 + [7] * 5 + [9] * 4 + [16] * 2


@case
def compiled_steps(t):
    """Losses and parameters of a network whose batches have several sizes, of which the second is compiled for all."""
    t.tell("sizes", SIZES)
    weights = [t.give(f"weight.{i}", torch.randn(shape) * 0.3) for i, shape in enumerate([(12, 24), (24,), (24, 5)])]
    weights = [weight.clone().requires_grad_() for weight in weights]
    opt = torch.optim.AdamW(weights, lr=1e-2)

    @torch.compile
    def loss_of(x, y):
        hidden = torch.nn.functional.gelu(x @ weights[0])
        hidden = torch.nn.functional.layer_norm(hidden, (24,), weights[1])
        return torch.nn.functional.cross_entropy(hidden @ weights[2], y)

    for step, size in enumerate(SIZES):
        x = t.give(f"x.{step}", torch.randn(size, 12))
        y = t.give(f"y.{step}", torch.randint(5, (size,)))
        loss = loss_of(x, y)
        loss.backward()
        opt.step()
        opt.zero_grad()
        t.expect(f"loss.{step}", loss, rtol=1e-5)
    for index, weight in enumerate(weights):
        t.expect(f"weight.{index}", weight, rtol=1e-5, atol=1e-5)


def trained(t, model, opt, batches):
    """Gives a model's state and its batches, trains it compiled, and expects the losses and the state at the end."""
    for name, value in model.state_dict().items():
        t.give(f"state.{name}", value)
    loss_of = torch.compile(lambda x, y: torch.nn.functional.cross_entropy(model(x).flatten(0, -2), y.flatten()))
    for step, (x, y) in enumerate(batches):
        loss = loss_of(t.give(f"x.{step}", x), t.give(f"y.{step}", y))
        loss.backward()
        opt.step()
        opt.zero_grad()
        t.expect(f"loss.{step}", loss, rtol=1e-5)
    for name, value in model.state_dict().items():
        t.expect(f"state.{name}", value, rtol=1e-4, atol=1e-5)


@case
def compiled_cnn(t):
    """A frozen convolution, batch normalization and a second convolution, with SGD."""
    model = torch.nn.Sequential(
        torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(4, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(8 * 3 * 3, 5),
    )
    model[0].requires_grad_(False)
    opt = torch.optim.SGD([value for value in model.parameters() if value.requires_grad], lr=0.05, momentum=0.9)
    trained(t, model, opt, [(torch.randn(8, 1, 12, 12), torch.randint(5, (8,))) for _ in range(20)])


class Gpt(torch.nn.Module):
    """One block of attention; the head shares the embedding's weights."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(16, 8)
        self.norm = torch.nn.LayerNorm(8)
        # A bias of the keys changes nothing, and AdamW would enlarge the rounding of its gradient.
        self.attention = torch.nn.Linear(8, 24, bias=False)
        self.project = torch.nn.Linear(8, 8)

    def forward(self, tokens):
        x = self.embedding(tokens)
        q, k, v = self.attention(self.norm(x)).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4).unbind(0)
        heads = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(heads.transpose(1, 2).flatten(2))
        return x @ self.embedding.weight.T


@case
def compiled_gpt(t):
    """Attention and tied weights, with AdamW."""
    model = Gpt()
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    batches = [(torch.randint(16, (4, 6)), torch.randint(16, (4, 6))) for _ in range(20)]
    trained(t, model, opt, batches)
