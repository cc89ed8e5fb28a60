"""Layers: equal initial values from the same seed, equal printed forms, outputs and gradients, to the bit."""

import torch
from harness import case
from torch import nn

LAYERS = {
    "linear": (lambda: nn.Linear(5, 3), (4, 5)),
    "linear_3d": (lambda: nn.Linear(5, 3, bias=False), (2, 4, 5)),
    "conv1d": (lambda: nn.Conv1d(4, 6, 3, stride=2, padding=1, groups=2), (2, 4, 9)),
    "conv2d": (lambda: nn.Conv2d(3, 8, 3), (2, 3, 8, 8)),
    "conv2d_options": (lambda: nn.Conv2d(4, 8, (3, 5), stride=(2, 1), padding=(1, 2), dilation=2, groups=4, bias=False), (2, 4, 16, 16)),
    "conv2d_same": (lambda: nn.Conv2d(3, 4, 4, padding="same", dilation=2), (2, 3, 9, 9)),
    "conv2d_reflect": (lambda: nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"), (2, 3, 6, 6)),
    "conv2d_replicate": (lambda: nn.Conv2d(3, 4, 3, padding=(1, 2), padding_mode="replicate"), (2, 3, 6, 6)),
    "conv2d_circular_same": (lambda: nn.Conv2d(3, 4, 4, padding="same", padding_mode="circular"), (2, 3, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(2, 4, 3, padding=1), (1, 2, 4, 5, 6)),
    "conv_transpose1d": (lambda: nn.ConvTranspose1d(4, 6, 3, stride=2, output_padding=1), (2, 4, 5)),
    "conv_transpose2d": (lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2, bias=False), (2, 4, 5, 5)),
    "conv_transpose3d": (lambda: nn.ConvTranspose3d(2, 3, 2, dilation=2), (1, 2, 3, 3, 3)),
    "batch_norm1d": (lambda: nn.BatchNorm1d(6), (8, 6)),
    "batch_norm1d_3d": (lambda: nn.BatchNorm1d(6, momentum=None), (4, 6, 5)),
    "batch_norm2d": (lambda: nn.BatchNorm2d(4, eps=1e-3, momentum=0.2), (3, 4, 5, 5)),
    "batch_norm2d_not_affine": (lambda: nn.BatchNorm2d(4, affine=False), (3, 4, 5, 5)),
    "batch_norm2d_not_tracked": (lambda: nn.BatchNorm2d(4, track_running_stats=False), (3, 4, 5, 5)),
    "batch_norm3d": (lambda: nn.BatchNorm3d(2), (2, 2, 3, 3, 3)),
    "layer_norm": (lambda: nn.LayerNorm(12), (3, 4, 12)),
    "layer_norm_2d": (lambda: nn.LayerNorm([4, 12], eps=1e-6), (3, 4, 12)),
    "layer_norm_not_affine": (lambda: nn.LayerNorm(12, elementwise_affine=False), (3, 4, 12)),
    "layer_norm_without_bias": (lambda: nn.LayerNorm(12, bias=False), (3, 4, 12)),
    "rms_norm": (lambda: nn.RMSNorm(12), (3, 4, 12)),
    "rms_norm_options": (lambda: nn.RMSNorm([4, 12], eps=1e-6, elementwise_affine=False), (3, 4, 12)),
    "group_norm": (lambda: nn.GroupNorm(3, 6), (2, 6, 5, 5)),
    "group_norm_not_affine": (lambda: nn.GroupNorm(2, 6, eps=1e-3, affine=False), (2, 6, 5)),
    "dropout": (lambda: nn.Dropout(0.3), (16, 16)),
    "dropout1d": (lambda: nn.Dropout1d(0.3), (4, 8, 5)),
    "dropout1d_without_batch": (lambda: nn.Dropout1d(0.3), (8, 5)),
    "dropout3d_without_batch": (lambda: nn.Dropout3d(0.3), (8, 3, 3, 3)),
    "dropout2d": (lambda: nn.Dropout2d(0.3), (4, 8, 5, 5)),
    "dropout3d": (lambda: nn.Dropout3d(0.3), (2, 8, 3, 3, 3)),
    "alpha_dropout": (lambda: nn.AlphaDropout(0.3), (16, 16)),
    "relu": (nn.ReLU, (4, 9)),
    "relu6": (nn.ReLU6, (4, 9)),
    "gelu": (nn.GELU, (4, 9)),
    "gelu_tanh": (lambda: nn.GELU(approximate="tanh"), (4, 9)),
    "silu": (nn.SiLU, (4, 9)),
    "mish": (nn.Mish, (4, 9)),
    "tanh": (nn.Tanh, (4, 9)),
    "sigmoid": (nn.Sigmoid, (4, 9)),
    "log_sigmoid": (nn.LogSigmoid, (4, 9)),
    "selu": (nn.SELU, (4, 9)),
    "hardswish": (nn.Hardswish, (4, 9)),
    "hardsigmoid": (nn.Hardsigmoid, (4, 9)),
    "softplus": (nn.Softplus, (4, 9)),
    "identity": (nn.Identity, (4, 9)),
    "leaky_relu": (lambda: nn.LeakyReLU(0.2), (4, 9)),
    "elu": (lambda: nn.ELU(0.7), (4, 9)),
    "softmax": (lambda: nn.Softmax(dim=-1), (4, 9)),
    "log_softmax": (lambda: nn.LogSoftmax(dim=1), (4, 9)),
    "prelu": (lambda: nn.PReLU(6), (2, 6, 5)),
    "max_pool1d": (lambda: nn.MaxPool1d(3, stride=2, padding=1), (2, 3, 9)),
    "max_pool2d": (lambda: nn.MaxPool2d((2, 3), dilation=2, ceil_mode=True), (2, 3, 9, 9)),
    "max_pool3d": (lambda: nn.MaxPool3d(2), (1, 2, 4, 4, 4)),
    "avg_pool1d": (lambda: nn.AvgPool1d(3, stride=2, padding=1), (2, 3, 9)),
    "avg_pool2d": (lambda: nn.AvgPool2d(3, stride=2, padding=1, count_include_pad=False), (2, 3, 9, 9)),
    "avg_pool3d": (lambda: nn.AvgPool3d(2, ceil_mode=True), (1, 2, 5, 5, 5)),
    "adaptive_avg_pool1d": (lambda: nn.AdaptiveAvgPool1d(4), (2, 3, 9)),
    "adaptive_avg_pool2d": (lambda: nn.AdaptiveAvgPool2d((3, 2)), (2, 3, 9, 9)),
    "adaptive_avg_pool3d": (lambda: nn.AdaptiveAvgPool3d(2), (1, 2, 5, 5, 5)),
    "flatten": (nn.Flatten, (2, 3, 4)),
    "flatten_dims": (lambda: nn.Flatten(0, 1), (2, 3, 4)),
    "sequential": (lambda: nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Dropout(0.5), nn.Linear(4, 2)), (3, 5)),
}


def expect_form(t, layers, name, module):
    """What a new module is printed as, the names of its state, and its initial values."""
    layers[name] = {"text": repr(module), "names": list(module.state_dict())}
    for key, value in module.state_dict().items():
        t.expect(f"{name}.init.{key}", value)


def scored(y):
    """A sum with weights that differ, so that a gradient in the wrong place is found."""
    return (y * (torch.arange(y.numel(), dtype=y.dtype).reshape(y.shape) / y.numel())).sum()


def expect_grads(t, name, module):
    for key, parameter in module.named_parameters():
        if parameter.grad is not None:
            t.expect(f"{name}.grad.{key}", parameter.grad)


def passes(t, name, module, x, call=None):
    """Forward and backward passes in training mode, then in evaluation mode."""
    for mode in ("train", "eval"):
        module.train(mode == "train")
        module.zero_grad()
        own = x.clone().requires_grad_()
        torch.manual_seed(11)
        y = (call or module)(own)
        t.expect(f"{name}.{mode}", y)
        if y.requires_grad:
            scored(y).backward()
            t.expect(f"{name}.{mode}.grad", own.grad)
        expect_grads(t, f"{name}.{mode}", module)
    for key, buffer in module.named_buffers():
        t.expect(f"{name}.after.{key}", buffer)


@case
def nn_layers(t):
    layers = {}
    t.tell("layers", layers)
    for name, (make, shape) in LAYERS.items():
        torch.manual_seed(7)
        module = make()
        expect_form(t, layers, name, module)
        passes(t, name, module, t.give(f"{name}.x", torch.randn(shape)))


@case
def nn_init(t):
    """Every function of torch.nn.init, on weights of several shapes."""
    init = nn.init
    functions = {
        "uniform": lambda w: init.uniform_(w, -0.3, 0.7),
        "normal": lambda w: init.normal_(w, 0.1, 2.0),
        "trunc_normal": lambda w: init.trunc_normal_(w, std=0.02),
        "trunc_normal_shifted": lambda w: init.trunc_normal_(w, 0.5, 1.0, -0.2, 0.9),
        "constant": lambda w: init.constant_(w, 0.3),
        "ones": init.ones_,
        "zeros": init.zeros_,
        "xavier_uniform": lambda w: init.xavier_uniform_(w, init.calculate_gain("tanh")),
        "xavier_normal": init.xavier_normal_,
        "kaiming_uniform": lambda w: init.kaiming_uniform_(w, 0.2),
        "kaiming_normal": lambda w: init.kaiming_normal_(w, mode="fan_out", nonlinearity="relu"),
        "orthogonal": lambda w: init.orthogonal_(w, 1.5),
    }
    for number, shape in enumerate([(7, 5), (3, 8), (4, 2, 3, 3), (6, 2, 3)]):
        all_functions = dict(functions)
        if len(shape) == 2:
            all_functions |= {"eye": init.eye_, "sparse": lambda w: init.sparse_(w, 0.3)}
        else:
            all_functions |= {"dirac": lambda w: init.dirac_(w, 2)}
        for name, function in all_functions.items():
            torch.manual_seed(5)
            t.expect(f"{name}.{number}", function(torch.empty(shape)))
