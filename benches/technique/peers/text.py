"""The text, as most people write it with PyTorch, and tuned by hand."""

import itertools
import pathlib
import types

from common import COMPILED, CUDA, DEVICE, FUSED, JOB, LEARNING_RATE, PRECISIONS, TUNED
from common import Precision, initial, serve, torch, tuned
from torch import nn
from torch.nn import functional

BATCH = JOB["batch_size"]
CONTEXT, WIDTH, HEADS, BLOCKS, VOCABULARY = (1024, 768, 12, 12, 50304) if CUDA else (128, 192, 6, 4, 128)
MARKS = 20


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.perceptron = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.attention(self.norm1(x)).split(width, dim=2)
        q, k, v = (it.view(batch, length, HEADS, width // HEADS).transpose(1, 2) for it in (q, k, v))
        heads = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(heads.transpose(1, 2).reshape(batch, length, width))
        return x + self.perceptron(self.norm2(x))


class Gpt(nn.Module):
    def __init__(self):
        super().__init__()
        self.characters, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        for embedding in (self.characters, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, text):
        x = self.characters(text) + self.places(torch.arange(text.shape[1], device=text.device))
        return self.norm(self.blocks(x)) @ self.characters.weight.T


class Pieces:
    """Pieces of the text at random places."""

    def __init__(self):
        text = pathlib.Path(JOB["train"]).read_text()
        numbers = {character: number for number, character in enumerate(sorted(set(text)))}
        self.text = torch.tensor([numbers[character] for character in text])

    def __iter__(self):
        while True:
            at = torch.randint(len(self.text) - CONTEXT, (BATCH,))
            x = torch.stack([self.text[i : i + CONTEXT] for i in at])
            y = torch.stack([self.text[i + 1 : i + 1 + CONTEXT] for i in at])
            yield x, y


def upload(tensor):
    return tensor.pin_memory().to(DEVICE, non_blocking=True) if CUDA and TUNED else tensor.to(DEVICE)


def build(precision="float32", fused=None):
    loader = Pieces()
    model = initial(Gpt).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=fused)
    forward = torch.compile(model) if COMPILED else model
    precision = Precision(precision)

    def train(batches):
        model.train()
        total, inputs = torch.zeros((), device=DEVICE), 0
        for x, y in batches:
            x, y = upload(x), upload(y)
            with precision.autocast():
                loss = functional.cross_entropy(forward(x).view(-1, VOCABULARY), y.view(-1))
            optimizer.zero_grad(set_to_none=True)
            precision.step(loss, optimizer)
            total += loss.detach() * len(y)
            inputs += len(y)
        return inputs, total.item() / max(inputs, 1)

    def parts():
        batches = iter(loader)
        return (itertools.islice(batches, JOB["length"] // MARKS) for _ in range(MARKS))

    return types.SimpleNamespace(loader=loader, read_ahead=0, train=train, accuracy=lambda: None, parts=parts)


if __name__ == "__main__":
    options, text = {}, "float32"
    if TUNED:
        options, text = tuned({"fused": True}, {"precision": PRECISIONS, "fused": FUSED}, build)
    serve(lambda: build(**options), [text], options, CONTEXT)
