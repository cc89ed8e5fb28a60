"""Attention and transformers: initial values, outputs, weights and gradients, in training, evaluation, and evaluation
without gradients, where PyTorch takes fused operators."""

import torch
from harness import case
from nn_layers import expect_form, expect_grads, scored
from torch import nn

ATTENTIONS = {
    "plain": lambda: nn.MultiheadAttention(8, 2),
    "batch_first": lambda: nn.MultiheadAttention(8, 4, batch_first=True),
    "dropout": lambda: nn.MultiheadAttention(8, 2, dropout=0.3, batch_first=True),
    "without_bias": lambda: nn.MultiheadAttention(8, 2, bias=False, batch_first=True),
    "bias_kv": lambda: nn.MultiheadAttention(8, 2, add_bias_kv=True),
    "zero_attn": lambda: nn.MultiheadAttention(8, 2, add_zero_attn=True, batch_first=True),
    "odd_heads": lambda: nn.MultiheadAttention(9, 3, batch_first=True),
    "kdim_vdim": lambda: nn.MultiheadAttention(8, 2, kdim=5, vdim=6, batch_first=True),
    "everything": lambda: nn.MultiheadAttention(8, 2, dropout=0.2, add_bias_kv=True, add_zero_attn=True, kdim=5),
}
# Which inputs are the same tensor.
INPUTS = ("self", "memory", "separate", "unbatched")
MASKS = {
    "none": {},
    "no_weights": {"need_weights": False},
    "each_head": {"average_attn_weights": False},
    "bool": {"attn_mask": "bool"},
    "float": {"attn_mask": "float"},
    "per_head": {"attn_mask": "per_head", "average_attn_weights": False},
    "padding": {"key_padding_mask": "bool"},
    "float_padding": {"key_padding_mask": "float", "need_weights": False},
    "both": {"attn_mask": "bool", "key_padding_mask": "bool"},
    "both_no_weights": {"attn_mask": "per_head", "key_padding_mask": "bool", "need_weights": False},
    "causal": {"attn_mask": "causal", "is_causal": True},
    "causal_no_weights": {"attn_mask": "causal", "is_causal": True, "need_weights": False},
}
MODES = ("train", "eval", "no_grad")
BATCH, LENGTH, KEYS = 2, 4, 5


def shaped(module, inputs):
    """The shapes of query, key and value."""
    if inputs == "unbatched":
        return [(LENGTH, module.embed_dim), (KEYS, module.kdim), (KEYS, module.vdim)]
    keys = LENGTH if inputs == "self" else KEYS
    shapes = [(BATCH, LENGTH, module.embed_dim), (BATCH, keys, module.kdim), (BATCH, keys, module.vdim)]
    return shapes if module.batch_first else [(length, batch, size) for batch, length, size in shapes]


def attn_mask(kind, rows, queries, keys):
    causal = torch.ones(queries, keys).triu(1).bool()
    match kind:
        case None:
            return None
        case "causal" | "bool":
            return causal
        case "float":
            return torch.randn(queries, keys)
        case "per_head":
            # No row is masked as a whole.
            return (torch.rand(rows, queries, keys) > 0.6) & (torch.arange(keys) > 0)


def padding_mask(kind, batch, keys):
    if kind == "float":
        return torch.randn(batch, keys)
    return torch.arange(keys) >= torch.tensor([[keys], [keys - 2]])[:batch] if kind else None


@case
def nn_attention(t):
    layers, calls = {}, []
    t.tell("layers", layers)
    t.tell("calls", calls)
    for layer, make in ATTENTIONS.items():
        torch.manual_seed(7)
        module = make()
        expect_form(t, layers, layer, module)
        for inputs in INPUTS:
            if inputs in ("self", "memory") and not module._qkv_same_embed_dim:
                continue
            shapes = shaped(module, inputs)
            batch = 1 if inputs == "unbatched" else BATCH
            queries, keys = LENGTH, LENGTH if inputs == "self" else KEYS
            given = [t.give(f"{layer}.{inputs}.{name}", torch.randn(shape)) for name, shape in zip("qkv", shapes)]
            for masks, options in MASKS.items():
                name = f"{layer}.{inputs}.{masks}"
                mask = attn_mask(options.get("attn_mask"), batch * module.num_heads, queries, keys)
                padding = padding_mask(options.get("key_padding_mask"), batch, keys)
                if padding is not None and inputs == "unbatched":
                    padding = padding[0]
                for key, value in {"attn_mask": mask, "key_padding_mask": padding}.items():
                    if value is not None:
                        t.give(f"{name}.{key}", value)
                call = {
                    "layer": layer, "inputs": inputs, "name": name, "has_attn_mask": mask is not None,
                    "has_padding": padding is not None,
                    "need_weights": options.get("need_weights", True),
                    "average_attn_weights": options.get("average_attn_weights", True),
                    "is_causal": options.get("is_causal", False),
                }
                calls.append(call)
                attend(t, module, call, given, mask, padding)


def attend(t, module, call, given, mask, padding):
    for mode in MODES:
        name = f"{call['name']}.{mode}"
        module.train(mode == "train")
        module.zero_grad()
        q, k, v = own = [x.clone().requires_grad_(mode != "no_grad") for x in given]
        match call["inputs"]:
            case "self":
                k = v = q
            case "memory":
                v = k
        torch.manual_seed(11)
        with torch.set_grad_enabled(mode != "no_grad"):
            y, weights = module(
                q, k, v, attn_mask=mask, key_padding_mask=padding, need_weights=call["need_weights"],
                average_attn_weights=call["average_attn_weights"], is_causal=call["is_causal"],
            )
        t.expect(name, y)
        if weights is not None:
            t.expect(f"{name}.weights", weights)
        if mode != "no_grad":
            (scored(y) + (0 if weights is None else scored(weights))).backward()
            for key, x in zip("qkv", own):
                if x.grad is not None:
                    t.expect(f"{name}.grad_of_{key}", x.grad)
            expect_grads(t, name, module)


def layer(**options):
    return nn.TransformerEncoderLayer(8, options.pop("nhead", 2), 12, **options)


TRANSFORMERS = {
    "layer": lambda: layer(),
    "layer_batch_first": lambda: layer(batch_first=True),
    "layer_gelu": lambda: layer(batch_first=True, activation="gelu", layer_norm_eps=1e-3, dropout=0.0),
    "layer_norm_first": lambda: layer(batch_first=True, norm_first=True, activation="gelu"),
    "layer_without_bias": lambda: layer(batch_first=True, bias=False),
    "layer_one_head": lambda: layer(batch_first=True, nhead=1),
    "layer_defaults": lambda: nn.TransformerEncoderLayer(8, 2),
    "encoder": lambda: nn.TransformerEncoder(layer(batch_first=True), 2),
    "encoder_norm": lambda: nn.TransformerEncoder(layer(batch_first=True), 3, norm=nn.LayerNorm(8)),
    "encoder_not_nested": lambda: nn.TransformerEncoder(layer(batch_first=True), 2, enable_nested_tensor=False),
    "encoder_norm_first": lambda: nn.TransformerEncoder(layer(batch_first=True, norm_first=True), 2, nn.LayerNorm(8)),
    "encoder_length_first": lambda: nn.TransformerEncoder(layer(), 2),
}
ENCODINGS = {
    "none": {},
    "bool": {"attn_mask": "bool"},
    "float": {"attn_mask": "float"},
    "per_head": {"attn_mask": "per_head"},
    "padding": {"key_padding_mask": "bool"},
    "both": {"attn_mask": "bool", "key_padding_mask": "bool"},
    "padding_between": {"key_padding_mask": "between"},
    "causal": {"attn_mask": "causal", "is_causal": True},
    "not_causal": {"attn_mask": "causal", "is_causal": False},
}


@case
def nn_transformer(t):
    layers, calls = {}, []
    t.tell("layers", layers)
    t.tell("calls", calls)
    for name, make in TRANSFORMERS.items():
        torch.manual_seed(7)
        module = make()
        # What is drawn afterwards shows that as many numbers were drawn before.
        t.expect(f"{name}.drawn_after", torch.rand(3))
        expect_form(t, layers, name, module)
        first = module.layers[0] if isinstance(module, nn.TransformerEncoder) else module
        shape = (BATCH, LENGTH, 8) if first.self_attn.batch_first else (LENGTH, BATCH, 8)
        for inputs in ("batch", "unbatched"):
            is_batch = inputs == "batch"
            x = t.give(f"{name}.{inputs}", torch.randn(shape if is_batch else (LENGTH, 8)))
            batch = BATCH if is_batch else 1
            for masks, options in ENCODINGS.items():
                if masks == "padding_between" and not is_batch:
                    continue
                call = f"{name}.{inputs}.{masks}"
                mask = attn_mask(options.get("attn_mask"), batch * first.self_attn.num_heads, LENGTH, LENGTH)
                padding = padding_mask(options.get("key_padding_mask"), batch, LENGTH)
                if masks == "padding_between":
                    padding = torch.tensor([[False, True, False, False], [True, False, False, True]])
                if padding is not None and not is_batch:
                    padding = padding[0]
                for key, value in {"attn_mask": mask, "key_padding_mask": padding}.items():
                    if value is not None:
                        t.give(f"{call}.{key}", value)
                calls.append({
                    "layer": name, "inputs": inputs, "name": call, "has_attn_mask": mask is not None,
                    "has_padding": padding is not None, "is_causal": options.get("is_causal"),
                })
                encode(t, module, call, x, mask, padding, options.get("is_causal"))


def encode(t, module, call, given, mask, padding, is_causal):
    is_encoder = isinstance(module, nn.TransformerEncoder)
    masks = {"mask" if is_encoder else "src_mask": mask, "src_key_padding_mask": padding}
    for mode in MODES:
        name = f"{call}.{mode}"
        module.train(mode == "train")
        module.zero_grad()
        x = given.clone().requires_grad_(mode != "no_grad")
        torch.manual_seed(11)
        with torch.set_grad_enabled(mode != "no_grad"):
            y = module(x, **masks, is_causal=is_causal if is_encoder else bool(is_causal))
        t.expect(name, y)
        if mode != "no_grad":
            scored(y).backward()
            t.expect(f"{name}.grad_of_x", x.grad)
            expect_grads(t, name, module)
