"""Tables of models, beside torchinfo's."""

import torch
import torchinfo
from harness import case
from torch import nn


class Block(nn.Module):
    """As in Rust."""

    def __init__(self, channels):
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, groups=2, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        self.act = nn.LeakyReLU()

    def forward(self, x):
        return x + self.act(self.norm(self.conv(x)))


def models():
    yield "mlp", nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Dropout(0.5), nn.Linear(30, 5, bias=False)), (16, 20)
    convs = nn.Sequential(nn.Conv2d(3, 8, 3, stride=2), nn.BatchNorm2d(8), Block(8), Block(8), nn.MaxPool2d(2))
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.LayerNorm(8), nn.Linear(8, 4))
    yield "convs", nn.Sequential(convs, head), (2, 3, 33, 33)
    frozen = nn.Sequential(nn.ConvTranspose2d(2, 4, 2, stride=2), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 1))
    for parameter in frozen[0].parameters():
        parameter.requires_grad_(False)
    yield "frozen", frozen, (3, 2, 5, 6)


@case
def nn_summary(t):
    told = {}
    for name, model, shape in models():
        found = torchinfo.summary(model, input_data=torch.zeros(shape), mode="eval", verbose=0, depth=9)
        rows = [
            {
                "class": row.class_name, "depth": row.depth, "output": list(row.output_size),
                "params": row.num_params if row.is_leaf_layer else row.leftover_params(),
                "mult_adds": row.macs if row.is_leaf_layer else 0,
            }
            for row in found.summary_list
        ]
        told[name] = {
            "rows": rows, "shape": shape, "params": found.total_params, "trainable": found.trainable_params,
            "mult_adds": found.total_mult_adds, "output_bytes": found.total_output_bytes,
            "params_bytes": found.total_param_bytes,
        }
    t.tell("summaries", told)
    t.expect("rows", sum(len(it["rows"]) for it in told.values()))
