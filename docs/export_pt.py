#!/usr/bin/env python3
"""Turns PyTorch's `.pt` state into a checkpoint that `overdrive_checkpoint::load` reads.

    export_pt.py --model model.pt --optimizer optimizer.pt --step 1000 step-000000001000

Each file is what `torch.save(model.state_dict(), ..)` or `torch.save(optimizer.state_dict(), ..)` wrote; `--model-key`
takes a dictionary inside of a larger checkpoint (`--model run.pt --model-key model_state_dict`). Files are read with
`weights_only=True`: nothing in them is run. Needs torch, and nothing else.

Names stay PyTorch's: a tch model loads them when its variables have the same names. An optimizer's become
`state.P.NAME` for parameter P and `param_groups.G.NAME` for the options of group G, `betas` as `betas.0` and `betas.1`.
P counts parameters as PyTorch did, which is not the order of a tch `VarStore`: the field `model_names` holds PyTorch's.
"""

import argparse
import json
import math
import os
import struct
import zlib

import torch

FORMAT = 1
DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
    torch.complex64: "C64",
}  # fmt: skip

# How PyTorch computes a step, and what the optimizer's type says already.
IMPLIED = ("foreach", "fused", "capturable", "differentiable", "decoupled_weight_decay", "param_names")

# What PyTorch's schedules leave in an optimizer's groups; here a schedule keeps it.
SCHEDULES = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")


def plain(value):
    """A value that is no tensor, as the manifest holds it."""
    if isinstance(value, bool):
        return {"bool": value}
    if isinstance(value, int):
        return {"int": value}
    if isinstance(value, float):
        if math.isfinite(value):
            return {"float": value}
        return {"float": "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"}
    if isinstance(value, str):
        return {"text": value}
    raise SystemExit(f"cannot export a {type(value).__name__}: expected a tensor, a number, a text or a truth value")


def flatten_model(state):
    for key, value in state.items():
        if not isinstance(value, (torch.Tensor, bool, int, float, str)):
            raise SystemExit(f"model: `{key}`: expected a tensor or a plain value, found {type(value).__name__}")
    # A count that only momentum=None needs, and that tch's batch norm does not keep.
    return {key: value for key, value in state.items() if not key.endswith("num_batches_tracked")}


def flatten_optimizer(state):
    if set(state) != {"state", "param_groups"}:
        raise SystemExit(f"optimizer: expected `state` and `param_groups`, found {sorted(state)}")
    flat = {}
    for number, group in enumerate(state["param_groups"]):
        for name, value in group.items():
            key = f"param_groups.{number}.{name}"
            if name == "params":
                flat[key] = len(value)
            elif isinstance(value, (tuple, list)):
                flat.update({f"{key}.{index}": item for index, item in enumerate(value) if item is not None})
            elif isinstance(value, torch.Tensor):
                flat[key] = value.item()
            elif value is not None and name not in IMPLIED + SCHEDULES:
                flat[key] = value
    # PyTorch numbers parameters by the order of the groups, as Overdrive does.
    for index, slots in state["state"].items():
        for name, value in slots.items():
            if name == "step":
                # A plain number in old files.
                value = torch.as_tensor(value, dtype=torch.float32)
            if value is not None:
                flat[f"state.{index}.{name}"] = value
    return flat


def write_part(folder, name, flat):
    """Writes NAME.safetensors, and returns what the manifest says of the part."""
    tensors = {key: value for key, value in flat.items() if isinstance(value, torch.Tensor)}
    values = {key: plain(value) for key, value in flat.items() if not isinstance(value, torch.Tensor)}
    if not tensors:
        return {"file": None, "values": values}
    for key, tensor in tensors.items():
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            raise SystemExit(f"{name}: `{key}`: a dense tensor of a dtype of safetensors, not {tensor.dtype}")
    order = sorted(tensors, key=lambda key: (-tensors[key].element_size(), key))
    header, end = {}, 0
    for key in order:
        tensor = tensors[key]
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[key] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    crc, size = 0, 0
    with open(os.path.join(folder, f"{name}.safetensors"), "wb") as file:
        def put(data):
            nonlocal crc, size
            crc, size = zlib.crc32(data, crc), size + len(data)
            file.write(data)

        put(struct.pack("<Q", len(text)) + text)
        for key in order:
            flat_bytes = tensors[key].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            put(bytes(flat_bytes.untyped_storage())[flat_bytes.storage_offset() :][: flat_bytes.numel()])
        file.flush()
        os.fsync(file.fileno())
    return {"file": {"bytes": size, "crc32": f"{crc:08x}"}, "values": values}


def read(path, key):
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name in key.split(".") if key else []:
        if name not in state:
            raise SystemExit(f"{path}: no key `{name}`; there are {sorted(map(str, state))}")
        state = state[name]
    return state


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="FILE", help="a model's state_dict")
    parser.add_argument("--model-key", metavar="KEY", help="where it is in the file, with dots between names")
    parser.add_argument("--optimizer", metavar="FILE", help="an optimizer's state_dict")
    parser.add_argument("--optimizer-key", metavar="KEY", help="where it is in the file, with dots between names")
    parser.add_argument("--step", type=int, default=0, help="the step that it was saved at")
    parser.add_argument("folder", help="the folder to make, step-000000001000 say")
    options = parser.parse_args(arguments)
    parts, fields = {}, {}
    if options.model:
        parts["model"] = flatten_model(read(options.model, options.model_key))
        fields["model_names"] = list(parts["model"])
    if options.optimizer:
        parts["optimizer"] = flatten_optimizer(read(options.optimizer, options.optimizer_key))
    if not parts:
        parser.error("nothing to export: name a --model, an --optimizer or both")
    os.makedirs(options.folder)
    manifest = {
        "format": FORMAT,
        "step": options.step,
        "written_by": "export_pt.py",
        "parts": {name: write_part(options.folder, name, flat) for name, flat in parts.items()},
        "fields": fields,
    }
    # The first line holds the checksum of the rest.
    rest = json.dumps(manifest, indent=2, allow_nan=False)[2:] + "\n"
    with open(os.path.join(options.folder, "manifest.json"), "w", encoding="utf-8", newline="\n") as file:
        file.write(f'{{"crc32": "{zlib.crc32(rest.encode()):08x}",\n{rest}')
        file.flush()
        os.fsync(file.fileno())
    print(f"{options.folder}: {', '.join(parts)}")


if __name__ == "__main__":
    main()
