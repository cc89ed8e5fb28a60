"""PyTorch's examples/word_language_model in small: an LSTM with tied weights, truncated backpropagation, annealed SGD."""

import os
import pathlib

import torch
from shipped import hamlet
from torch import nn
from torch.nn import functional as F

# Model


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid, nlayers, dropout=0.5, tie_weights=False):
        super().__init__()
        self.ntoken = ntoken
        self.drop = nn.Dropout(dropout)
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, nlayers, dropout=dropout)
        self.decoder = nn.Linear(nhid, ntoken)
        if tie_weights:
            if nhid != ninp:
                raise ValueError("When using the tied flag, nhid must be equal to emsize")
            self.decoder.weight = self.encoder.weight
        self.init_weights()
        self.nhid = nhid
        self.nlayers = nlayers

    def init_weights(self):
        initrange = 0.1
        nn.init.uniform_(self.encoder.weight, -initrange, initrange)
        nn.init.zeros_(self.decoder.bias)
        nn.init.uniform_(self.decoder.weight, -initrange, initrange)

    def forward(self, input, hidden):
        emb = self.drop(self.encoder(input))
        output, hidden = self.rnn(emb, hidden)
        output = self.drop(output)
        decoded = self.decoder(output)
        decoded = decoded.view(-1, self.ntoken)
        return F.log_softmax(decoded, dim=1), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return (weight.new_zeros(self.nlayers, bsz, self.nhid), weight.new_zeros(self.nlayers, bsz, self.nhid))


# Data


class Corpus:
    def __init__(self, text):
        self.word2idx = {}
        lines = text.split("\n")
        cut = (len(lines) * 8 // 10, len(lines) * 9 // 10)
        self.train = self.tokenize(lines[: cut[0]])
        self.valid = self.tokenize(lines[cut[0] : cut[1]])
        self.test = self.tokenize(lines[cut[1] :])

    def tokenize(self, lines):
        ids = []
        for line in lines:
            for word in line.split() + ["<eos>"]:
                ids.append(self.word2idx.setdefault(word, len(self.word2idx)))
        return torch.tensor(ids)


def batchify(data, bsz):
    nbatch = data.size(0) // bsz
    data = data.narrow(0, 0, nbatch * bsz)
    return data.view(bsz, -1).t().contiguous()


def repackage_hidden(h):
    return tuple(v.detach() for v in h)


BPTT = 20


def get_batch(source, i):
    seq_len = min(BPTT, len(source) - 1 - i)
    data = source[i : i + seq_len]
    target = source[i + 1 : i + 1 + seq_len].view(-1)
    return data, target


# Training


def evaluate(model, data_source, eval_batch_size):
    model.eval()
    total_loss = 0.0
    hidden = model.init_hidden(eval_batch_size)
    with torch.no_grad():
        for i in range(0, data_source.size(0) - 1, BPTT):
            data, targets = get_batch(data_source, i)
            output, hidden = model(data, hidden)
            hidden = repackage_hidden(hidden)
            total_loss += len(data) * F.nll_loss(output, targets).item()
    return total_loss / (len(data_source) - 1)


def train(model, train_data, batch_size, lr):
    model.train()
    hidden = model.init_hidden(batch_size)
    for i in range(0, train_data.size(0) - 1, BPTT):
        data, targets = get_batch(train_data, i)
        model.zero_grad()
        hidden = repackage_hidden(hidden)
        output, hidden = model(data, hidden)
        loss = F.nll_loss(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-lr)
        print(f"loss {loss.item()}")


def main():
    save = pathlib.Path(os.environ.get("OUT_DIR", ".")) / "model.pt"
    torch.manual_seed(1111)
    corpus = Corpus(hamlet())
    train_data = batchify(corpus.train, 20)[:601]
    val_data = batchify(corpus.valid, 10)
    test_data = batchify(corpus.test, 10)
    model = RNNModel(len(corpus.word2idx), 64, 64, 2, 0.2, tie_weights=True)
    lr = 20.0
    best_val_loss = None
    for _epoch in range(2):
        train(model, train_data, 20, lr)
        val_loss = evaluate(model, val_data, 10)
        print(f"valid loss {val_loss}")
        if best_val_loss is None or val_loss < best_val_loss:
            torch.save(model.state_dict(), save)
            best_val_loss = val_loss
        else:
            lr /= 4.0
    model.load_state_dict(torch.load(save))
    model.rnn.flatten_parameters()
    print(f"test loss {evaluate(model, test_data, 10)}")


if __name__ == "__main__":
    main()
