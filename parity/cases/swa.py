"""Stochastic weight averaging of a model with batch norm."""

import torch
from harness import case
from torch import nn
from torch.optim.swa_utils import AveragedModel, update_bn


@case
def swa_update_bn(t):
    """Averaged weights, and the statistics of the averaged model, from batches of which the last is smaller."""
    torch.manual_seed(7)
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, momentum=0.3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 5), nn.BatchNorm1d(5),
    )
    average = AveragedModel(model)
    opt = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    batches = [t.give(f"batch.{index}", torch.randn(size, 3, 6, 6)) for index, size in enumerate([8, 8, 8, 5])]
    for batch in batches:
        model(batch).square().mean().backward()
        opt.step()
        opt.zero_grad()
        average.update_parameters(model)
    average.eval()
    before = average(batches[0])
    update_bn(batches, average)
    t.expect("before", before)
    t.expect("after", average(batches[0]))
    for key, value in average.module.state_dict().items():
        t.expect(f"average.{key}", value)
    for key, value in model.state_dict().items():
        t.expect(f"model.{key}", value)
    assert [module.momentum for module in average.modules() if hasattr(module, "momentum")] == [0.3, 0.1]
