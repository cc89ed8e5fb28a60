"""Gradients of large batches; Rust must get the same by accumulating over their micro-batches."""

import torch
from harness import case


def mlp(x, weights):
    hidden = torch.tanh(x @ weights[0] + weights[1])
    return hidden @ weights[2] + weights[3]


@case
def accumulation_is_the_large_batch(t):
    """Gradients of whole windows, weighted by samples and by unmasked tokens, in float64 and float32."""
    windows = [[4, 4, 4, 4], [1, 9, 2], [16], [5, 3, 7, 1, 2], [8, 8, 3]]
    t.tell("windows", windows)
    for dtype, rtol, atol in ((torch.float64, 1e-11, 1e-14), (torch.float32, 2e-5, 1e-7)):
        name = str(dtype).removeprefix("torch.")
        weights = [torch.randn(shape, dtype=dtype) * 0.5 for shape in ((6, 8), (8,), (8, 5), (5,))]
        for index, weight in enumerate(weights):
            t.give(f"{name}.weight.{index}", weight)
            weight.requires_grad_()
        for number, sizes in enumerate(windows):
            x = t.give(f"{name}.{number}.x", torch.randn(sum(sizes), 6, dtype=dtype))
            targets = torch.randint(0, 5, (sum(sizes),))
            targets[torch.rand(sum(sizes)) < 0.3] = -100
            t.give(f"{name}.{number}.targets", targets)
            for kind, loss in (
                ("samples", mlp(x, weights).square().mean()),
                ("tokens", torch.nn.functional.cross_entropy(mlp(x, weights), targets)),
            ):
                grads = torch.autograd.grad(loss, weights)
                for index, grad in enumerate(grads):
                    t.expect(f"{name}.{number}.{kind}.{index}", grad, rtol=rtol, atol=atol)


@case
def gradient_noise_scale(t):
    """The simple noise scale of McCandlish et al., from the first micro-batch and the whole of each window."""
    windows, decay = [[4, 4, 4, 4], [8, 8], [2, 6, 8], [1, 9, 2], [5, 3, 7, 1, 2]], 0.9
    t.tell("windows", windows)
    t.tell("decay", decay)
    # Differences of norms amplify rounding.
    for dtype, rtol in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        name = str(dtype).removeprefix("torch.")
        weights = [torch.randn(shape, dtype=dtype) * 0.5 for shape in ((6, 8), (8,), (8, 5), (5,))]
        for index, weight in enumerate(weights):
            t.give(f"{name}.weight.{index}", weight)
            weight.requires_grad_()
        noise = gradient = 0.0
        for number, sizes in enumerate(windows):
            x = t.give(f"{name}.{number}.x", torch.randn(sum(sizes), 6, dtype=dtype))
            small, big = sizes[0], sum(sizes)
            norms = []
            for part in (x[:small], x):
                grads = torch.autograd.grad(mlp(part, weights).square().mean(), weights)
                norms.append(sum(grad.double().square().sum().item() for grad in grads))
            noise = decay * noise + (1 - decay) * (norms[0] - norms[1]) / (1 / small - 1 / big)
            gradient = decay * gradient + (1 - decay) * (big * norms[1] - small * norms[0]) / (big - small)
            t.expect(f"{name}.{number}", torch.tensor(noise / gradient, dtype=torch.float64), rtol=rtol)
