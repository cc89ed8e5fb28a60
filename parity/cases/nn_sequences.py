"""Layers with other inputs than one tensor of numbers: tables of vectors, bilinear and recurrent layers."""

import torch
from harness import case
from nn_layers import expect_form, expect_grads, scored
from torch import nn

EMBEDDINGS = {
    "embedding": lambda: nn.Embedding(7, 4),
    "padding_idx": lambda: nn.Embedding(7, 4, padding_idx=2),
    "padding_idx_from_the_end": lambda: nn.Embedding(7, 4, padding_idx=-1),
    "scale_grad_by_freq": lambda: nn.Embedding(7, 4, scale_grad_by_freq=True),
    "sparse": lambda: nn.Embedding(7, 4, sparse=True),
}
RECURRENT = {
    "lstm": lambda: nn.LSTM(5, 6),
    "lstm_deep": lambda: nn.LSTM(5, 6, num_layers=2, dropout=0.3, batch_first=True),
    "lstm_both_ways": lambda: nn.LSTM(5, 6, num_layers=2, bidirectional=True, bias=False),
    "gru": lambda: nn.GRU(5, 6),
    "gru_deep": lambda: nn.GRU(5, 6, num_layers=2, dropout=0.3, batch_first=True, bidirectional=True),
    "gru_without_bias": lambda: nn.GRU(5, 6, bias=False),
}


@case
def nn_embeddings(t):
    layers = {}
    t.tell("layers", layers)
    indices = t.give("indices", torch.tensor([[0, 2, 6, 2], [1, 2, 0, 0]]))
    for name, make in EMBEDDINGS.items():
        torch.manual_seed(7)
        module = make()
        expect_form(t, layers, name, module)
        y = module(indices)
        t.expect(name, y)
        scored(y).backward()
        t.expect(f"{name}.grad", module.weight.grad.to_dense() if module.sparse else module.weight.grad)


@case
def nn_bilinear(t):
    layers = {}
    t.tell("layers", layers)
    for name, bias in (("bilinear", True), ("without_bias", False)):
        torch.manual_seed(7)
        module = nn.Bilinear(3, 4, 5, bias=bias)
        expect_form(t, layers, name, module)
        a = t.give(f"{name}.a", torch.randn(2, 3)).requires_grad_()
        b = t.give(f"{name}.b", torch.randn(2, 4)).requires_grad_()
        y = module(a, b)
        t.expect(name, y)
        scored(y).backward()
        t.expect(f"{name}.grad_of_a", a.grad)
        t.expect(f"{name}.grad_of_b", b.grad)
        expect_grads(t, name, module)


@case
def nn_recurrent(t):
    """With and without a batch, and with a state to begin with; in training mode, where dropout draws, and evaluation."""
    layers = {}
    t.tell("layers", layers)
    for name, make in RECURRENT.items():
        torch.manual_seed(7)
        module = make()
        expect_form(t, layers, name, module)
        states = module.num_layers * (2 if module.bidirectional else 1)
        for form in ("zeros", "state", "unbatched"):
            shape = (4, 5) if form == "unbatched" else (3, 4, 5)
            batch = 3 if module.batch_first else 4
            x = t.give(f"{name}.{form}.x", torch.randn(shape))
            state = None
            if form == "state":
                h = t.give(f"{name}.h", torch.randn(states, batch, 6))
                c = t.give(f"{name}.c", torch.randn(states, batch, 6))
                state = (h, c) if isinstance(module, nn.LSTM) else h
            for mode in ("train", "eval"):
                module.train(mode == "train")
                module.zero_grad()
                own = x.clone().requires_grad_()
                torch.manual_seed(11)
                y, last = module(own, state)
                key = f"{name}.{form}.{mode}"
                t.expect(key, y)
                for number, each in enumerate(last if isinstance(last, tuple) else [last]):
                    t.expect(f"{key}.last.{number}", each)
                scored(y).backward()
                t.expect(f"{key}.grad_of_x", own.grad)
                expect_grads(t, key, module)
