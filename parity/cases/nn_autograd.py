"""Functions with a backward pass of their own: equal losses, derivatives of second order and error texts."""

import math

import torch
from harness import case
from torch.autograd import Function, grad
from torch.autograd.function import once_differentiable


class LegendrePolynomial3(Function):
    """The tutorial's."""

    @staticmethod
    def forward(ctx, input):
        ctx.save_for_backward(input)
        return 0.5 * (5 * input**3 - 3 * input)

    @staticmethod
    def backward(ctx, grad_output):
        (input,) = ctx.saved_tensors
        return grad_output * 1.5 * (5 * input**2 - 1)


class Quantize(Function):
    """Rounds to steps; the gradient passes straight through, within the range."""

    @staticmethod
    def forward(ctx, x, steps):
        ctx.save_for_backward(x)
        return (x.clamp(-1, 1) * steps).round() / steps

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        return grad_output * (x.abs() <= 1).to(grad_output.dtype), None


class Top(Function):
    """The largest values of each row, and where they are."""

    @staticmethod
    def forward(ctx, x, k):
        values, indices = x.topk(k, dim=1)
        ctx.save_for_backward(x, indices)
        ctx.mark_non_differentiable(indices)
        return values, indices

    @staticmethod
    def backward(ctx, grad_values, _):
        x, indices = ctx.saved_tensors
        return torch.zeros_like(x).scatter(1, indices, grad_values), None


class ProductAndSum(Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return a * b, a + b

    @staticmethod
    def backward(ctx, product, sum):
        a, b = ctx.saved_tensors
        return product * b + sum, product * a + sum


class Swish(Function):
    """x sigmoid(x), which can be differentiated twice."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x.sigmoid()

    @staticmethod
    def backward(ctx, grad_output):
        (x,) = ctx.saved_tensors
        s = x.sigmoid()
        return grad_output * (s + x * s * (1 - s))


def train(t, name, params, lr, loss_of):
    """20 steps of gradient descent."""
    losses = []
    for _ in range(20):
        loss = loss_of(*params)
        gradients = grad(loss, params)
        losses.append(loss.detach())
        with torch.no_grad():
            for param, gradient in zip(params, gradients):
                param -= lr * gradient
    t.expect(f"{name}.losses", torch.stack(losses))
    for number, param in enumerate(params):
        t.expect(f"{name}.{number}", param)


def leaves(t, name, *tensors):
    return [t.give(f"{name}.{number}", tensor).requires_grad_() for number, tensor in enumerate(tensors)]


@case
def nn_autograd(t):
    x = t.give("x", torch.linspace(-math.pi, math.pi, 200))
    y = t.give("y", torch.sin(x))
    polynomial = leaves(t, "polynomial", *(torch.full((), value) for value in (0.0, -1.0, 0.0, 0.3)))

    def fitted(a, b, c, d):
        return (a + b * LegendrePolynomial3.apply(c + d * x) - y).pow(2).sum()

    train(t, "polynomial", polynomial, 5e-6, fitted)

    data = t.give("data", torch.randn(16, 8))
    quantized = leaves(t, "quantized", torch.randn(8, 4), torch.randn(4))
    train(t, "quantized", quantized, 0.1, lambda w, b: (data @ Quantize.apply(w, 4.0) + b).pow(2).mean())

    def both(w, b):
        product, sum = ProductAndSum.apply(data @ w, b)
        top, _ = Top.apply(product, 2)
        return (top - 1).pow(2).mean() + sum.abs().mean()

    train(t, "both", leaves(t, "both", torch.randn(8, 4), torch.randn(4)), 0.05, both)
    equation(t)
    t.tell("texts", texts())


def equation(t):
    """A heat equation: u_t = u_xx."""
    x, time = leaves(t, "point", torch.rand(10, 1), torch.rand(10, 1))
    curvature = []

    def residual(w1, b1, w2, b2):
        u = Swish.apply(torch.cat([x, time], 1) @ w1 + b1) @ w2 + b2
        u_x, u_t = grad(u.sum(), [x, time], create_graph=True)
        (u_xx,) = grad(u_x, x, torch.ones_like(u_x), create_graph=True)
        curvature.append(u_xx)
        return (u_t - u_xx).pow(2).mean() + (u - x).pow(2).mean()

    shapes = [(2, 12), (12,), (12, 1), (1,)]
    train(t, "equation", leaves(t, "equation", *(torch.randn(shape) for shape in shapes)), 0.01, residual)
    t.expect("u_xx", torch.stack(curvature))


class WrongCount(Function):
    @staticmethod
    def forward(ctx, a, b):
        return a + b

    @staticmethod
    def backward(ctx, grad_output):
        return grad_output


class WrongShape(WrongCount):
    @staticmethod
    def backward(ctx, grad_output):
        return torch.ones(3), grad_output


class InPlace(Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, grad_output):
        return 2 * grad_output


class Lost(InPlace):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x * 2


def texts():
    """What goes wrong, in PyTorch's words."""
    found = {}

    def fails(name, run):
        try:
            run()
        except (RuntimeError, ValueError) as error:
            # Python's name for the type, in C++'s.
            found[name] = str(error).replace("torch.FloatTensor", "CPUFloatType")

    x, w = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    fails("count", lambda: grad(WrongCount.apply(x, w).sum(), x))
    fails("shape", lambda: grad(WrongShape.apply(x, w).sum(), x))
    y = Swish.apply(x + 0)
    fails("freed", lambda: (grad(y.sum(), x), grad(y.sum(), x)))
    z = x + 0
    y = Swish.apply(z)
    z.add_(1)
    fails("changed", lambda: grad(y.sum(), x))
    y = Quantize.apply(x * x, 4.0)
    (first,) = grad((y * y).sum(), x, create_graph=True)
    fails("twice", lambda: first.sum().backward())
    fails("leaf", lambda: InPlace.apply(x))
    fails("lost", lambda: Lost.apply(x + 0))
    fails("unused", lambda: grad((x * 2).sum(), [x, w]))
    fails("not_scalar", lambda: grad(x * 2, x))
    fails("not_real", lambda: grad(torch.complex(x, w)[0], x))
    fails("constant", lambda: grad(torch.ones(1), x))
    fails("not_required", lambda: grad(x.sum(), torch.ones(1)))
    fails("grad_shape", lambda: grad(x * 2, x, torch.ones(3, 1)))
    return found
