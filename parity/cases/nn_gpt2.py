"""Hugging Face's GPT-2, in the version of `.config/libtorch-requirements.txt`."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from harness import case
from nn_models import model

OPTIONS = (
    "vocab_size", "n_positions", "n_embd", "n_layer", "n_head", "resid_pdrop", "embd_pdrop", "attn_pdrop",
    "layer_norm_epsilon", "initializer_range",
)
DROPOUT = dict(resid_pdrop=0.2, embd_pdrop=0.3, attn_pdrop=0.4)


@case
def nn_model_gpt2(t):
    t.tell("defaults", [(name, getattr(GPT2Config(), name)) for name in OPTIONS])
    dims = dict(vocab_size=97, n_positions=32, n_embd=24, n_layer=3, n_head=4, bos_token_id=None, eos_token_id=None)
    cases = {
        "default": {},
        "options": DROPOUT | dict(layer_norm_epsilon=1e-4, initializer_range=0.1),
        "no_dropout": dict.fromkeys(DROPOUT, 0.0),
    }
    for name, options in cases.items():
        tokens = torch.randint(97, (2, 32 if name == "options" else 17))
        make = lambda options=options: GPT2LMHeadModel(GPT2Config(**dims, **options))
        model(t, name, make, tokens, lambda module, x: module(x).logits, load=name != "no_dropout")
    assert GPT2LMHeadModel(GPT2Config(**dims)).config._attn_implementation == "sdpa"
