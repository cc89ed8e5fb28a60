"""torchvision's models: names, initial weights, forward and backward passes, loading."""

import torch
import torchvision.models as models
from torchvision.models.vision_transformer import VisionTransformer

from harness import case

# Larger tensors are compared by a digest, which keeps the files small.
WHOLE = 64


def digest(tensor):
    """A tensor itself if it is small, or else a sum over the bits of all elements, each weighted by its place."""
    tensor = tensor.detach()
    if tensor.numel() <= WHOLE:
        return tensor
    bits = tensor.contiguous().view(torch.int32).flatten().to(torch.int64)
    total = (bits * (torch.arange(bits.numel()) % 251 + 1)).sum().item()
    return torch.tensor([total >> 32, total & 0xFFFFFFFF])


def draw(parameters, seed):
    """Moves all parameters a little, so that none is 0 or 1 and every gradient matters."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter += torch.randn_like(parameter) * 0.01


def model(t, name, make, x, call=lambda module, x: module(x), load=True):
    """Everything about one model. `call` computes with it; with `load`, Rust loads a state dict of other weights."""
    t.give(f"{name}.x", x)
    torch.manual_seed(7)
    module = make()
    t.expect(f"{name}.drawn", torch.rand(4))
    t.tell(f"{name}.names", list(module.state_dict()))
    for key, value in module.state_dict().items():
        t.expect(f"{name}.init.{key}", digest(value))
    draw(module.parameters(), 3)
    for mode in ("train", "eval"):
        module.train(mode == "train")
        module.zero_grad()
        torch.manual_seed(11)
        y = call(module, x)
        assert y.isfinite().all() and y.abs().max() > 0
        t.expect(f"{name}.{mode}", y)
        # Weights that differ, so that a gradient in the wrong place is found.
        (y * (torch.arange(y.numel()).reshape(y.shape) / y.numel())).sum().backward()
        for key, parameter in module.named_parameters():
            t.expect(f"{name}.{mode}.grad.{key}", digest(parameter.grad))
    for key, buffer in module.named_buffers():
        t.expect(f"{name}.after.{key}", digest(buffer))
    if load:
        draw(module.parameters(), 5)
        for key, value in module.state_dict().items():
            t.give(f"{name}.state.{key}", value)
    with torch.no_grad():
        t.expect(f"{name}.loaded", call(module, x))


def images(size):
    return torch.randn(2, 3, size, size)


@case
def nn_model_resnet(t):
    model(t, "resnet18", lambda: models.resnet18(num_classes=10), images(64))
    model(t, "resnet34", lambda: models.resnet34(num_classes=10), images(33), load=False)
    model(t, "resnet50", lambda: models.resnet50(num_classes=10), images(64), load=False)


@case
def nn_model_mobilenet_v2(t):
    make = lambda: models.mobilenet_v2(num_classes=10, width_mult=0.35, dropout=0.3)
    model(t, "narrow", make, images(64))
    make = lambda: models.mobilenet_v2(num_classes=10, width_mult=1.1)
    model(t, "wide", make, images(40), load=False)


@case
def nn_model_efficientnet_b0(t):
    model(t, "default", lambda: models.efficientnet_b0(), images(40), load=False)
    make = lambda: models.efficientnet_b0(num_classes=10, dropout=0.4, stochastic_depth_prob=0.6)
    model(t, "deep", make, images(64))


@case
def nn_model_vit_b_16(t):
    with torch.device("meta"):
        vit = models.vit_b_16()
    layers = vit.encoder.layers
    lengths = {"num_layers": len(layers), "num_heads": layers[0].num_heads}
    names = (
        "image_size", "patch_size", "num_layers", "num_heads", "hidden_dim", "mlp_dim", "dropout", "attention_dropout",
        "num_classes",
    )
    t.tell("defaults", [(name, lengths.get(name) or getattr(vit, name)) for name in names])
    dims = dict(image_size=32, patch_size=8, num_layers=3, num_heads=4, hidden_dim=24, mlp_dim=40, num_classes=10)
    model(t, "small", lambda: VisionTransformer(**dims), images(32))
    make = lambda: VisionTransformer(**dims, dropout=0.1, attention_dropout=0.2)
    model(t, "dropout", make, images(32), load=False)
