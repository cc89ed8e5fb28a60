"""Runs the Python half of every parity case, and writes its inputs and expected values.

A case is a function here and one of the same name in Rust (parity/src/cases). This half makes the inputs with
`t.give` and `t.tell`, computes with PyTorch, and records each expected value and its tolerance with `t.expect`.

    python harness.py OUT_DIR [FILTER]
"""

import importlib
import json
import pathlib
import re
import struct
import sys
import traceback

import torch

DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}
MODULES = (
    "amp", "accum", "optim", "optim_grid", "optim_papers", "optim_timm", "checkpoint", "mnist", "dataload", "augment",
    "targets", "tokens", "samplers", "sched", "ddp", "profiler", "nn_layers", "nn_sequences", "nn_attention", "nn_models", "nn_gpt2", "nn_files", "nn_summary",
    "nn_autograd", "optim_closures", "optim_packages", "swa", "metrics", "lr_finder", "compile", "memory",
)
CASES = {}


def case(function):
    """Registers a parity case under its function's name."""
    CASES[function.__name__] = function
    return function


class Recorder:
    """Collects a case's inputs and expected values."""

    def __init__(self):
        self.tensors = {}
        self.checks = []
        self.values = {}

    def give(self, name, tensor):
        """Gives the Rust half a tensor, and returns it."""
        self.tensors["given." + name] = tensor.detach().clone()
        return tensor

    def tell(self, name, value):
        """Gives the Rust half a plain value (anything that JSON supports)."""
        self.values[name] = value

    def expect(self, name, tensor, rtol=0.0, atol=0.0):
        """Records a value that the Rust half must compute, bit for bit unless a tolerance is given."""
        self.tensors["expected." + name] = torch.as_tensor(tensor).detach().clone()
        self.checks.append({"name": name, "rtol": rtol, "atol": atol})


def save_safetensors(path, tensors):
    """Writes the safetensors format without its package: a length, a JSON header, the bytes."""
    header, blobs, offset = {}, [], 0
    for name, tensor in tensors.items():
        blob = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() if tensor.numel() else b""
        header[name] = {
            "dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, offset + len(blob)],
        }
        blobs.append(blob)
        offset += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def skip_module(out, module, wanted, package):
    """Records for each case of a module that a package is missing: a GPU box may have only torch."""
    source = pathlib.Path(__file__).with_name(f"{module}.py").read_text()
    for name in re.findall(r"^@case\ndef (\w+)", source, re.MULTILINE):
        if wanted in name:
            record = {"checks": [], "values": {}, "failure": None, "missing": package}
            (out / f"{name}.json").write_text(json.dumps(record))


# Without one of these, the cases that need it are skipped. g++ is no module, but a case says so in the same way.
OPTIONAL = {"PIL", "g++", "huggingface_hub", "numpy", "prodigyopt", "safetensors", "schedulefree", "timm", "torchinfo", "torchvision", "transformers"}


def main():
    out, wanted = pathlib.Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else ""
    for module in MODULES:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name.split(".")[0] not in OPTIONAL:
                raise
            skip_module(out, module, wanted, error.name)
    torch.set_num_threads(1)
    for name, function in CASES.items():
        if wanted not in name:
            continue
        recorder = Recorder()
        torch.manual_seed(0)
        failure = missing = None
        try:
            function(recorder)
        except Exception as error:  # the Rust half reports a failed case
            package = (error.name or "").split(".")[0] if isinstance(error, ModuleNotFoundError) else None
            if package in OPTIONAL:
                missing = package
            else:
                failure = traceback.format_exc()
        save_safetensors(out / f"{name}.safetensors", recorder.tensors)
        record = {"checks": recorder.checks, "values": recorder.values, "failure": failure, "missing": missing}
        (out / f"{name}.json").write_text(json.dumps(record))
        print(name, flush=True)


if __name__ == "__main__":
    # The case modules import `harness`: make them use this module, not a second copy.
    sys.modules["harness"] = sys.modules["__main__"]
    sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
    main()
