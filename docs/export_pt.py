#!/usr/bin/env python3
"""Turns PyTorch's `.pt` state into a checkpoint that `overdrive_checkpoint::load` reads, and back.

    export_pt.py --model model.pt --optimizer optimizer.pt --scaler scaler.pt --scheduler scheduler.pt \\
        --step 1000 step-000000001000
    export_pt.py --to-pt run.pt step-000000001000

Each file is what `torch.save(model.state_dict(), ..)` wrote, or `torch.save` of another's `state_dict()`; `--model-key`
takes a dictionary inside of a larger checkpoint (`--model run.pt --model-key model_state_dict`). Files are read with
`weights_only=True`: nothing in them is run. Needs torch, and nothing else.

Names stay PyTorch's: a tch model loads them when its variables have the same names. An optimizer's become
`state.P.NAME` for parameter P and `param_groups.G.NAME` for the options of group G, `betas` as `betas.0` and `betas.1`.
P is the parameter's name where PyTorch has saved it (an optimizer over `model.named_parameters()`), and the state then
loads by name. Else P counts parameters as PyTorch did, which is not the order of a tch `VarStore`: the field
`model_names` holds PyTorch's.
What PyTorch's schedulers leave in the groups (`initial_lr`, ..) is in the field `param_groups`, a dictionary a group.

The other way, `run.pt` holds a dictionary a part (`model`, `optimizer`, `scaler`, `scheduler`, and what else there is
as it is), `step` and `fields`: `torch.load` it, and give each to its `load_state_dict`.
"""

import argparse
import itertools
import json
import math
import os
import re
import shutil
import struct
import zlib

import torch

FORMAT = 1
DTYPES = {
    torch.bool: "BOOL", torch.uint8: "U8", torch.int8: "I8", torch.int16: "I16", torch.int32: "I32",
    torch.int64: "I64", torch.float16: "F16", torch.bfloat16: "BF16", torch.float32: "F32", torch.float64: "F64",
    torch.complex64: "C64",
}  # fmt: skip
OF_DTYPE = {name: dtype for dtype, name in DTYPES.items()}

# How PyTorch computes a step, and what the optimizer's type says already.
IMPLIED = ("foreach", "fused", "capturable", "differentiable")

# What PyTorch's schedulers leave in an optimizer's groups; here a schedule keeps it.
SCHEDULES = ("initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr")

SCALER = ("scale", "growth_factor", "backoff_factor", "growth_interval", "_growth_tracker")
PLATEAU = ("last_epoch", "best", "num_bad_epochs", "cooldown_counter")

PART_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9_.-]{0,99}")


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


def of_plain(entry):
    """The value that `plain` has written."""
    ((kind, value),) = entry.items()
    return float(value) if kind == "float" else value


def number(value):
    """PyTorch has rates as numbers and as tensors of one number."""
    return value.item() if isinstance(value, torch.Tensor) else value


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
    for place, group in enumerate(state["param_groups"]):
        for name, value in group.items():
            key = f"param_groups.{place}.{name}"
            if name == "params":
                flat[key] = len(value)
            elif name in IMPLIED + SCHEDULES or value is None:
                continue
            elif isinstance(value, (tuple, list)):
                flat.update({f"{key}.{index}": number(item) for index, item in enumerate(value) if item is not None})
            else:
                flat[key] = number(value)
    # By name where PyTorch has saved the names; else by number, counted over the groups as PyTorch and Overdrive do.
    names = {}
    for group in state["param_groups"]:
        names.update(zip(group["params"], group.get("param_names") or group["params"]))
    if len(set(names.values())) < len(names):
        twice = sorted({str(name) for name in names.values() if list(names.values()).count(name) > 1})
        raise SystemExit(f"optimizer: several parameters are called {twice}: save it without `param_names`, or with others")
    for index, slots in state["state"].items():
        for name, value in slots.items():
            if name == "step":
                # A plain number in old files.
                value = torch.as_tensor(value, dtype=torch.float32)
            if value is not None:
                flat[f"state.{names[index]}.{name}"] = value
    return flat


def left_by_schedulers(state):
    """What schedulers keep in the optimizer's groups, a dictionary a group."""
    return [{name: number(group[name]) for name in SCHEDULES if name in group} for group in state["param_groups"]]


def flatten_scaler(state):
    if state and set(state) != set(SCALER):
        raise SystemExit(f"scaler: expected {sorted(SCALER)}, found {sorted(state)}")
    return {key: number(value) for key, value in state.items()}


def flatten_scheduler(state, groups):
    """As `LrScheduler` or `ReduceLrOnPlateau` has it; what a schedule is made of stays in the program."""
    if "num_bad_epochs" in state:
        flat = {key: number(state[key]) for key in PLATEAU}
        flat["best"] = float(flat["best"])
        rates, name = state["_last_lr"], "lrs"
    else:
        inner = state
        while "last_epoch" not in inner and inner.get("_schedulers"):
            inner = inner["_schedulers"][0]
        flat = {"last_epoch": inner.get("last_epoch")}
        while "base_lrs" not in inner and inner.get("_schedulers"):
            inner = inner["_schedulers"][0]
        rates, name = inner.get("base_lrs") or [group.get("initial_lr") for group in groups], "base_lrs"
        if flat["last_epoch"] is None or not rates or None in rates:
            raise SystemExit(f"scheduler: expected `last_epoch` and `base_lrs`, found {sorted(state)}")
    flat.update({f"{name}.{index}": float(number(rate)) for index, rate in enumerate(rates)})
    return flat


def tied_names(tensors):
    """Names that mean the same memory as a name before, and that name."""
    seen, tied = {}, {}
    for key in sorted(tensors):
        tensor = tensors[key]
        if tensor.layout != torch.strided or tensor.dim() == 0 or tensor.numel() == 0 or key == "format":
            continue
        kept = seen.setdefault((tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()), key)
        if kept != key:
            tied[key] = kept
    return tied


def write_part(folder, name, flat):
    """Writes NAME.safetensors, and returns what the manifest says of the part."""
    tensors = {key: value for key, value in flat.items() if isinstance(value, torch.Tensor)}
    values = {key: plain(value) for key, value in flat.items() if not isinstance(value, torch.Tensor)}
    if not tensors:
        return {"file": None, "values": values}
    for key, tensor in tensors.items():
        if tensor.dtype not in DTYPES or tensor.layout != torch.strided:
            raise SystemExit(f"{name}: `{key}`: a dense tensor of a dtype of safetensors, not {tensor.dtype}")
    tied = tied_names(tensors)
    order = sorted(tensors.keys() - tied, key=lambda key: (-tensors[key].element_size(), key))
    header, end = {"__metadata__": {"format": "pt", **tied}}, 0
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
            return f"{zlib.crc32(data):08x}"

        pieces = {"header": put(struct.pack("<Q", len(text)) + text), "tensors": {}}
        for key in order:
            flat_bytes = tensors[key].detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            data = bytes(flat_bytes.untyped_storage())[flat_bytes.storage_offset() :][: flat_bytes.numel()]
            pieces["tensors"][key] = put(data)
        file.flush()
        os.fsync(file.fileno())
    return {"file": {"bytes": size, "crc32": f"{crc:08x}", "pieces": pieces}, "values": values}


def read(path, key):
    state = torch.load(path, map_location="cpu", weights_only=True)
    for name in key.split(".") if key else []:
        if name not in state:
            raise SystemExit(f"{path}: no key `{name}`; there are {sorted(map(str, state))}")
        state = state[name]
    return state


def write_checkpoint(folder, step, parts, fields):
    """Makes the folder whole beside its place, and renames it."""
    if os.path.exists(folder):
        raise SystemExit(f"{folder}: there is something of this name already")
    aside = folder.rstrip("/") + ".writing"
    shutil.rmtree(aside, ignore_errors=True)
    os.makedirs(aside)
    try:
        manifest = {
            "format": FORMAT,
            "step": step,
            "written_by": "export_pt.py",
            "parts": {name: write_part(aside, name, flat) for name, flat in parts.items()},
            "fields": fields,
        }
        # The first line holds the checksum of the rest.
        rest = json.dumps(manifest, indent=2, allow_nan=False)[2:] + "\n"
        with open(os.path.join(aside, "manifest.json"), "w", encoding="utf-8", newline="\n") as file:
            file.write(f'{{"crc32": "{zlib.crc32(rest.encode()):08x}",\n{rest}')
            file.flush()
            os.fsync(file.fileno())
        os.rename(aside, folder)
    except BaseException:
        shutil.rmtree(aside, ignore_errors=True)
        raise


def read_part(folder, name, part):
    """The entries of a part by name, tied ones under each of their names."""
    flat = {key: of_plain(entry) for key, entry in part["values"].items()}
    if part["file"] is None:
        return flat
    path = os.path.join(folder, f"{name}.safetensors")
    with open(path, "rb") as file:
        data = bytearray(file.read())
    found = f"{zlib.crc32(data):08x}"
    if len(data) != part["file"]["bytes"] or found != part["file"]["crc32"]:
        raise SystemExit(f"{path}: expected {part['file']}, found {len(data)} bytes and crc32 {found}")
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    tied = header.pop("__metadata__", {})
    for key, info in header.items():
        start, end = info["data_offsets"]
        # In memory of its own, which is aligned.
        one = bytearray(data[8 + length + start : 8 + length + end])
        dtype = OF_DTYPE[info["dtype"]]
        tensor = torch.frombuffer(one, dtype=dtype) if one else torch.empty(0, dtype=dtype)
        flat[key] = tensor.reshape(info["shape"])
    flat.update({key: flat[kept] for key, kept in tied.items() if key not in header and kept in header})
    return flat


def read_manifest(folder):
    path = os.path.join(folder, "manifest.json")
    with open(path, "rb") as file:
        first, rest = file.readline(), file.read()
    expected = f'{{"crc32": "{zlib.crc32(rest):08x}",\n'
    if first != expected.encode():
        raise SystemExit(f"{path}: expected {expected.strip()}, found {first.decode(errors='replace').strip()}")
    manifest = json.loads(first + rest)
    if manifest["format"] > FORMAT:
        raise SystemExit(f"{path}: format: expected {FORMAT} or less, found {manifest['format']}")
    for name in manifest["parts"]:
        if not PART_NAME.fullmatch(name):
            raise SystemExit(f"{path}: a part's name: expected letters, digits, `_`, `-` and `.`, found {name!r}")
    return manifest


def tuples(group):
    """`betas.0` and `betas.1` as `betas`; an option that is not there is None."""
    lists = {}
    for name in [name for name in group if re.fullmatch(r".+\.\d+", name)]:
        option, index = name.rsplit(".", 1)
        lists.setdefault(option, {})[int(index)] = group.pop(name)
    for option, items in lists.items():
        group[option] = tuple(items.get(index) for index in range(max(items) + 1))
    return group


def optimizer_to_torch(flat, left):
    """An optimizer's part in PyTorch's layout: the one place that knows how the part names its entries.

    `left` is what schedulers leave in the groups. Parameters are numbered over all groups, in the order that the Rust
    program had: the PyTorch optimizer is to be made over them in that order. `param_names` says it, where there are names.
    """
    groups, slots = {}, {}
    for key, value in flat.items():
        kind, rest = key.split(".", 1)
        if kind == "param_groups":
            place, name = rest.split(".", 1)
            groups.setdefault(int(place), {})[name] = value
        else:
            name, slot = rest.rsplit(".", 1)
            slots.setdefault(name, {})[slot] = value
    param_groups, names = [], []
    for place in sorted(groups):
        group = tuples(groups[place])
        first, count = len(names), group.pop("params")
        names += group.get("param_names") or map(str, range(first, first + count))
        if "param_names" in group:
            group["param_names"] = list(group["param_names"])
        group.update(left[place] if place < len(left) else {})
        param_groups.append({**group, "params": list(range(first, first + count))})
    state = {index: slots[name] for index, name in enumerate(names) if name in slots}
    return {"state": state, "param_groups": param_groups}


def numbered(flat, name):
    return [flat[f"{name}.{index}"] for index in range(sum(key.startswith(f"{name}.") for key in flat))]


def scheduler_to_torch(flat, optimizer):
    """What a scheduler of the same options goes on from; PyTorch's puts it in the place of its own."""
    if "num_bad_epochs" in flat:
        return {**{key: flat[key] for key in PLATEAU}, "_last_lr": numbered(flat, "lrs")}
    rates = [group["lr"] for group in optimizer["param_groups"]] if optimizer else numbered(flat, "base_lrs")
    count = flat["last_epoch"]
    return {"last_epoch": count, "_step_count": count + 1, "base_lrs": numbered(flat, "base_lrs"), "_last_lr": rates}


def to_pt(folder, path):
    manifest = read_manifest(folder)
    for name, part in manifest["parts"].items():
        if part.get("rows") or isinstance(part.get("ranks"), dict):
            raise SystemExit(f"{folder}: {name!r} is one rank's shard: make a file of all by `overdrive-checkpoint consolidate`")
    run = {name: read_part(folder, name, part) for name, part in manifest["parts"].items()}
    schedule = run.pop("schedule", None)
    if "optimizer" in run:
        left = manifest["fields"].get("param_groups") or []
        rates = numbered(schedule or {}, "base_lrs")
        left = [{**(group or {}), **({} if rate is None else {"initial_lr": rate})}
                for group, rate in itertools.zip_longest(left, rates)]  # fmt: skip
        run["optimizer"] = optimizer_to_torch(run["optimizer"], left)
    if schedule is not None:
        run["scheduler"] = scheduler_to_torch(schedule, run.get("optimizer"))
    run.update(step=manifest["step"], fields=manifest["fields"])
    aside = path + ".writing"
    try:
        with open(aside, "wb") as file:
            torch.save(run, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except BaseException:
        if os.path.exists(aside):
            os.remove(aside)
        raise
    print(f"{path}: {', '.join(run)}")


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("model", "optimizer", "scaler", "scheduler"):
        parser.add_argument(f"--{name}", metavar="FILE", help=f"a {name}'s state_dict")
        parser.add_argument(f"--{name}-key", metavar="KEY", help="where it is in the file, with dots between names")
    parser.add_argument("--step", type=int, default=0, help="the step that it was saved at")
    parser.add_argument("--to-pt", metavar="FILE", help="reads the folder, and writes this file of PyTorch's")
    parser.add_argument("folder", help="the folder to make, or to read with --to-pt: step-000000001000 say")
    options = parser.parse_args(arguments)
    if options.to_pt:
        return to_pt(options.folder, options.to_pt)
    parts, fields = {}, {}
    if options.model:
        parts["model"] = flatten_model(read(options.model, options.model_key))
        fields["model_names"] = list(parts["model"])
    if options.optimizer:
        state = read(options.optimizer, options.optimizer_key)
        parts["optimizer"] = flatten_optimizer(state)
        fields["param_groups"] = left_by_schedulers(state)
    if options.scaler:
        parts["scaler"] = flatten_scaler(read(options.scaler, options.scaler_key))
    if options.scheduler:
        state = read(options.scheduler, options.scheduler_key)
        # As Rust's programs call it.
        parts["schedule"] = flatten_scheduler(state, fields.get("param_groups", []))
    if not parts:
        parser.error("nothing to export: name a --model, an --optimizer, a --scaler or a --scheduler")
    write_checkpoint(options.folder, options.step, parts, fields)
    print(f"{options.folder}: {', '.join(parts)}")


if __name__ == "__main__":
    main()
