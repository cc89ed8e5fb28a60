"""Files of weights: `.pt` files of every form, safetensors files and shards, and what `load_state_dict` says."""

import json
import pathlib
import sys
from collections import OrderedDict

import torch
from harness import case
from torch import nn


def folder(name):
    """A subfolder, because the other files in the harness's folder are cases."""
    path = pathlib.Path(sys.argv[1]) / name
    path.mkdir(exist_ok=True)
    return path


def flat(value, name=""):
    """The tensors and plain values under dotted names."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return {} if value is None else {name: value}
    found = {}
    for key, part in items:
        found |= flat(part, f"{name}.{key}" if name else str(key))
    return found


def expect_all(t, name, value):
    """Every tensor's bytes, and what else there is to say about it; plain values."""
    told = {}
    for key, part in flat(value).items():
        if isinstance(part, torch.Tensor):
            told[key] = {"dtype": str(part.dtype), "shape": list(part.shape), "stride": list(part.stride())}
            t.expect(f"{name}.{key}", part.detach().contiguous().reshape(-1).view(torch.uint8))
        else:
            told[key] = part
    return told


def dtypes():
    values = torch.tensor([0.0, -0.0, 1.5, -2.25, 1e4, float("inf"), float("-inf"), float("nan")])
    real = {str(d)[6:]: values.to(d) for d in (torch.float64, torch.float32, torch.float16, torch.bfloat16)}
    whole = torch.tensor([0, 1, 127, -128, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)])
    kinds = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    return real | {str(d)[6:]: whole.to(d) for d in kinds} | {"bool": torch.tensor([True, False, True])}


def views():
    base = torch.arange(24.0).reshape(4, 6)
    return {
        "transposed": base.t(), "strided": base[1::2, ::3], "row": base[2], "offset": base.reshape(-1)[5:],
        "expanded": torch.arange(3.0).expand(5, 3), "scalar": torch.tensor(2.5), "whole": torch.tensor(7),
        "empty": torch.zeros(0), "empty_2d": torch.zeros(3, 0, dtype=torch.int32), "base": base,
        "element": base[1, 2],
    }


def checkpoint():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(16, 3))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, amsgrad=True)
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(2, 2, 4, 4)).square().sum().backward()
        optimizer.step()
    return {
        "model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3, "best": -0.5, "done": False,
        "name": "größer 数", "none": None, "history": [1, 2.5, (True, "x", [])], "size": torch.Size([2, 3]),
        "large": 2**62, "small": -(2**62), "mid": 70000, 5: {"key": -1},
    }


FORMS = {
    "state_dict": lambda: nn.LSTM(3, 4, 2).state_dict(),
    "checkpoint": checkpoint,
    "dtypes": dtypes,
    "views": views,
    "complex": lambda: {"c64": torch.tensor([1 + 2j, -3j]), "c128": torch.tensor([0.5 - 1j], dtype=torch.complex128)},
    "parameters": lambda: {"a": nn.Parameter(torch.randn(3)), "b": nn.Parameter(torch.ones(2, 2), requires_grad=False)},
    "ordered": lambda: OrderedDict(b=torch.ones(1), a=OrderedDict(x=torch.zeros(2)), c=OrderedDict()),
    "list": lambda: [torch.ones(2), {"k": torch.zeros(1)}, (torch.arange(3),)],
    "many": lambda: {f"layer{i}.weight": torch.full((i % 5,), float(i)) for i in range(400)},
}


@case
def nn_pt_files(t):
    files = {}
    where = folder("pt")
    for name, make in FORMS.items():
        value = make()
        options = {"zip": {}, "legacy": {"_use_new_zipfile_serialization": False}, "protocol4": {"pickle_protocol": 4}}
        for form, option in options.items():
            path = where / f"{name}.{form}.pt"
            torch.save(value, path, **option)
            files[f"{name}.{form}"] = {"path": str(path), "entries": expect_all(t, f"{name}.{form}", value)}
    t.tell("files", files)


class Evil:
    """Calls a function with arguments when it is unpickled."""

    def __init__(self, function, *arguments):
        self.reduced = function, arguments

    def __reduce__(self):
        return self.reduced


@case
def nn_pt_refused(t):
    """Files that hold more than weights, each with the name that the refusal has to give."""
    import os

    import numpy

    where = folder("refused")
    marker = where / "was-run"
    values = {
        "posix.system": Evil(os.system, f"touch {marker}"),
        "__builtin__.eval": Evil(eval, f"open({str(marker)!r}, 'w')"),
        "__builtin__.exec": [Evil(exec, f"open({str(marker)!r}, 'w')")],
        "numpy._core.multiarray._reconstruct": {"mean": numpy.zeros(3)},
        "numpy._core.multiarray.scalar": {"loss": numpy.float64(0.5)},
        "torch.nn.modules.linear.Linear": nn.Linear(2, 2),
        "torch.nn.modules.container.Sequential": {"model": nn.Sequential(nn.Linear(2, 2))},
        "torch.float32": {"dtype": torch.float32},
        "torch.device": {"device": torch.device("cpu")},
        "__builtin__.set": {"set": {1, 2}},
    }
    files = {}
    for name, value in values.items():
        for form, new in (("zip", True), ("legacy", False)):
            path = where / f"{name}.{form}.pt"
            torch.save({"weight": torch.ones(2), "value": value}, path, _use_new_zipfile_serialization=new)
            files[str(path)] = name
    t.tell("files", files)
    t.tell("marker", str(marker))
    t.expect("refused", len(files))


class Net(nn.Module):
    """As in Rust."""

    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(4, 3)
        self.norm = nn.BatchNorm1d(3)
        self.blocks = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 2))


BROKEN = {
    "fits": {},
    "one_missing": {"fc1.weight": None},
    "many_missing": {"blocks.1.bias": None, "fc1.bias": None, "norm.running_mean": None, "norm.weight": None},
    "all_missing": {name: None for name in Net().state_dict()},
    "one_unexpected": {"head.weight": [2, 2]},
    "unexpected_everywhere": {
        "zz": [1], "blocks.1.more": [1], "aa.b.c": [1], "fc1.weight_orig": [3, 4], "blocks.x": [1], "norm.z": [],
        "fc1.weight.data": [1], "blocks": [1], "blocks.0.bias": [3], "fc10.weight": [1],
    },
    "sizes": {"fc1.weight": [3, 5], "norm.bias": [], "blocks.1.bias": [2, 1], "norm.num_batches_tracked": [2, 2]},
    "plain": {"fc1.bias": 3, "norm.weight": "text", "blocks.0.weight": 0.5, "blocks.1.weight": True},
    "all_kinds": {"fc1.weight": None, "fc1.bias": [4], "more": [1], "norm.bias": 1.5, "blocks.0.weight": None},
}


@case
def nn_load_state_dict(t):
    """The message for every broken state, strict or not."""
    told = {}
    for name, edits in BROKEN.items():
        for strict in (True, False):
            net = Net()
            metadata = net.state_dict()._metadata
            entries = {key: list(value.shape) for key, value in net.state_dict().items()} | edits
            entries = {key: entries[key] for key in sorted(entries) if entries[key] is not None}
            as_tensor = lambda key, it: torch.zeros(it, dtype=torch.int64 if "tracked" in key else torch.float32)
            values = ((key, as_tensor(key, it) if isinstance(it, list) else it) for key, it in entries.items())
            state = OrderedDict(values)
            # Without it, batch norm takes the state for one of PyTorch 0.4.
            state._metadata = metadata
            said = {"strict": strict, "entries": entries, "message": None, "missing": [], "unexpected": []}
            try:
                keys = net.load_state_dict(state, strict=strict)
                said |= {"missing": keys.missing_keys, "unexpected": keys.unexpected_keys}
            except RuntimeError as error:
                said["message"] = str(error)
            told[f"{name}.{'strict' if strict else 'not_strict'}"] = said
    t.tell("states", told)
    t.expect("states", len(told))


@case
def nn_safetensors(t):
    """Files of Python's package are read; files of the same state have the same bytes."""
    from huggingface_hub import split_torch_state_dict_into_shards
    from safetensors.torch import save_file

    where = folder("safetensors")
    files = {}
    states = {"dtypes": dtypes(), "complex": {"c": torch.tensor([1 + 2j])}, "empty": {}}
    states["views"] = {key: value.contiguous().clone() for key, value in views().items()}
    for name, state in states.items():
        save_file(state, where / f"{name}.safetensors", metadata={"format": "pt", "note": "größer"})
        files[name] = {"path": str(where / f"{name}.safetensors"), "entries": expect_all(t, name, state)}
    t.tell("files", files)
    torch.manual_seed(1)
    net = nn.Sequential(*(nn.Linear(7, n) for n in (3, 50, 2, 9, 1)))
    state = {f"{key}": value for key, value in sorted(net.state_dict().items())}
    for key, value in state.items():
        t.give(f"state.{key}", value)
    save_file(state, where / "bare.safetensors", metadata={"format": "pt"})
    t.tell("bare", str(where / "bare.safetensors"))
    shards = {}
    for most in (1, 100, 300, 2000, 10**6):
        split = split_torch_state_dict_into_shards(state, max_shard_size=most)
        own = folder(f"safetensors/{most}")
        for file, names in split.filename_to_tensors.items():
            save_file({name: state[name] for name in names}, own / file, metadata={"format": "pt"})
        index = {"metadata": split.metadata, "weight_map": split.tensor_to_filename}
        if split.is_sharded:
            (own / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        shards[most] = {"folder": str(own), "files": sorted(split.filename_to_tensors), "index": index}
    t.tell("shards", shards)
