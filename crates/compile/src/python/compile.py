"""Compiles a recorded step: makes a graph of its operators and hands it to AOTInductor.

Its arguments: the file of a record, a folder, and the folder of the cache. The record is of `overdrive_ffi::record`. The
folder gets the package, `step.pt2`, and `explain.json`, what its code calls. The cache keeps compiled headers and what is
known of this machine. Prints `stage NAME`, and `done` at the end.
"""

import hashlib
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections import Counter

import torch
import torch._inductor
from torch._inductor import codecache, config, cpu_vec_isa, lowering, scheduler


def dtype(name):
    return getattr(torch, DTYPES[name])


DTYPES = {
    "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Half": "float16",
    "Float": "float32", "Double": "float64", "Bool": "bool", "BFloat16": "bfloat16",
    "ComplexHalf": "complex32", "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}
MEMORY_FORMATS = [torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d]


def along(args):
    """The size of the dimension that an operator like `gather` takes its indices along."""
    return args[0].shape[args[1]] if args[0].dim() else 1


def classes(scores):
    return scores.shape[min(scores.dim(), 2) - 1]


# Where compiled code would read or write elsewhere, or end the process, libtorch's operators refuse an index: the place of
# the indices in their arguments, the size that they are below, and whether negative ones count from the end.
INDICES = {
    "embedding": (1, lambda args: args[0].shape[0], False),
    "embedding_dense_backward": (1, lambda args: args[2], False),
    "take": (1, lambda args: args[0].numel(), True),
    "put": (1, lambda args: args[0].numel(), True),
    "index_fill": (2, along, True),
    **dict.fromkeys(["gather", "index_select", "index_add", "index_copy", "index_reduce", "scatter", "scatter_add",
                     "scatter_reduce"], (2, along, False)),
}
# Indices by dimension, in a list. (`index` itself is not recorded: its result's shape may depend on values.)
LISTS = ["index_put", "_index_put_impl"]
MASKS = (torch.bool, torch.uint8)
# Labels with one that stands for none: their place, its place, and the number of classes.
LABELS = {
    **dict.fromkeys(["nll_loss_forward", "nll_loss2d_forward"], (1, 4, lambda args: classes(args[0]))),
    **dict.fromkeys(["nll_loss_backward", "nll_loss2d_backward"], (2, 5, lambda args: classes(args[1]))),
}
# Arguments that are written to, of which the schema does not say so.
WRITTEN = {"aten::native_batch_norm": [3, 4], "aten::cudnn_batch_norm": [3, 4], "aten::miopen_batch_norm": [3, 4]}


def short_name(node):
    return node["op"].removeprefix("aten::").removesuffix("_")


class Indices:
    """Sees to it that a step with an index that is out of range changes nothing and says so, while it runs to its end."""

    def __init__(self, tensors):
        self.before = {number: tensor.clone() for number, tensor in tensors.items()}
        self.owners = {number: number for number in tensors}
        self.written = set()
        self.unfit = []

    def fitting(self, indices, size, wraps=False, none=None):
        """The indices that are in range, and others in place of those that are not. A device checks its own."""
        if indices is None or indices.dtype in MASKS and none is None or indices.device.type != "cpu":
            return indices
        indices = indices.long()
        low = -size if wraps else 0
        fits = (indices >= low) & (indices < size)
        if none is None:
            self.unfit.append(~fits.all())
            return indices.clamp(low, size - 1)
        fits |= indices == none
        self.unfit.append(~fits.all())
        return torch.where(fits, indices, none)

    def checked(self, node, args):
        """An operator's arguments with indices that are in range."""
        name, args = short_name(node), list(args)
        if name in INDICES:
            place, size, wraps = INDICES[name]
            args[place] = self.fitting(args[place], size(args), wraps)
        elif name in LABELS:
            place, none, size = LABELS[name]
            args[place] = self.fitting(args[place], size(args), none=args[none])
        elif name in LISTS:
            # A mask takes as many dimensions as it has.
            taken = [one.dim() if one is not None and one.dtype in MASKS else 1 for one in args[1]]
            dims = itertools.accumulate(taken, initial=0)
            args[1] = [self.fitting(one, args[0].shape[dim], True) for one, dim in zip(args[1], dims)]
        return args

    def note(self, node, op):
        """Notes what an operator writes to, and which of its results are parts of which input."""
        own = WRITTEN.get(node["op"], [])
        owner = None
        for place, (arg, declared) in enumerate(zip(node["args"], op._schema.arguments)):
            alias = declared.alias_info
            owners = [self.owners.get(number) for number in numbers(arg)]
            if place in own or alias is not None and alias.is_write:
                self.written.update(owners)
            elif alias is not None:
                owner = owner if owner is not None else next(iter(owners), None)
        for out, declared in zip(node["out"], op._schema.returns):
            if owner is not None and declared.alias_info is not None:
                self.owners.update(dict.fromkeys(numbers(out), owner))

    def any_unfit(self):
        return torch.stack(self.unfit).any()

    def for_update(self, node, args):
        """Whether an index was out of range, for an update that changes nothing then by its numbers, as taking it back
        takes a tenth of an MLP's step. None where numbers cannot do that."""
        is_first_step = node["op"] == "aten::_fused_sgd_" and args[2] and args[9]
        exact = all(tensor.dtype in (torch.float32, torch.float64) for tensor in args[0])
        return self.any_unfit() if self.unfit and exact and not is_first_step else None

    def undo(self, tensors):
        """Takes back what else was written if an index was out of range; whether one was."""
        unfit = self.any_unfit()
        for number in sorted(self.written - {None}):
            tensors[number].copy_(torch.where(unfit, self.before[number], tensors[number]))
        return unfit


def numbers(arg):
    """The numbers of the tensors in an argument or result."""
    if isinstance(arg, list):
        return [number for item in arg for number in numbers(item)]
    if isinstance(arg, dict):
        return [arg["tensor"]] if "tensor" in arg else []
    return [arg] if isinstance(arg, int) else []


def operator(name, overload):
    namespace, name = name.split("::")
    return getattr(getattr(getattr(torch.ops, namespace), name), overload or "default")


class Step(torch.nn.Module):
    """Runs the recorded operators on given tensors."""

    def __init__(self, request):
        super().__init__()
        self.request = request

    def forward(self, *inputs):
        # In a record for batches of any size: where the size is found.
        size = inputs[self.request["batch"][0]].shape[0] if "batch" in self.request else None
        tensors = {given["number"]: tensor for given, tensor in zip(self.request["inputs"], inputs)}
        scalars = {}
        for scalar, tensor in zip(self.request["scalars"], inputs[len(self.request["inputs"]):]):
            for node, arg in scalar["uses"]:
                scalars[node, arg] = tensor
        operators = self.request["operators"]
        checked = {*INDICES, *LISTS, *LABELS}
        indices = Indices(tensors) if any(short_name(node) in checked for node in operators) else None
        for at, node in enumerate(operators):
            try:
                self.call(at, node, tensors, scalars, size, indices)
            except Exception as error:
                raise RuntimeError(f"operator {at}, {node['op']}.{node['overload']}: {error}; {node['args']}") from error
        outputs = tuple(tensors[number] for number in self.request["outputs"])
        # One more output than was asked for: whether an index was out of range.
        return (*outputs, indices.undo(tensors)) if indices and indices.unfit else outputs

    def call(self, at, node, tensors, scalars, size, indices):
        args = [scalars.get((at, i), value(arg, tensors, size)) for i, arg in enumerate(node["args"])]
        op = operator(node["op"], node["overload"])
        formula = FORMULAS.get(node["op"]) or FORMULAS.get(f"{node['op']}.{node['overload']}")
        unfit = indices.for_update(node, args) if indices and formula else None
        if indices and unfit is None:
            args = indices.checked(node, args)
            indices.note(node, op)
        if formula:
            while args and args[-1] is None:
                args.pop()
            if unfit is not None:
                # Gradients, or weights that averages follow: infinite ones would be NaN times 0.
                args[1] = [torch.where(unfit, 0.0, tensor) for tensor in args[1]]
            return formula(*args, unfit=unfit)
        if node["op"] == "aten::_foreach_copy_":
            return write(*args[:2])
        named = {declared.name: arg for arg, declared in zip(args, op._schema.arguments) if declared.kwarg_only}
        results = op(*[arg for arg, declared in zip(args, op._schema.arguments) if not declared.kwarg_only], **named)
        bind(node["out"], [results] if len(op._schema.returns) == 1 else results, tensors)


def bind(number, result, tensors):
    if isinstance(number, list):
        for one, of in zip(number, result if result is not None else []):
            bind(one, of, tensors)
    elif number is not None:
        tensors[number] = result


def value(arg, tensors, size):
    if isinstance(arg, list):
        return [value(item, tensors, size) for item in arg]
    if not isinstance(arg, dict):
        return arg
    (kind, what), = arg.items()
    if kind == "tensor":
        return tensors[what]
    if kind == "batch":
        factor, offset = what
        return factor * size + offset
    if kind == "dtype":
        return dtype(what)
    if kind == "device":
        return torch.device(what)
    if kind == "float":
        return float(what)
    if kind == "layout":
        return torch.strided
    if kind == "memory_format":
        return MEMORY_FORMATS[what]
    raise ValueError(f"an argument of unknown kind {kind}")


def example(given, size=None):
    shape = given["shape"] if size is None else [size, *given["shape"][1:]]
    return torch.empty_strided(shape, given["stride"], dtype=dtype(given["dtype"]), device=given["device"])


def export(request):
    """The graph of a step, and the least size of a batch that it is for."""
    varying = request.get("batch", [])
    # For a compiler, dimensions of size 1 are others, as they broadcast: where the step has one of size b - 1, the least
    # size is 3.
    sizes = [2, 3, 4] if varying else [None]
    # An example of a size that all of these allow.
    any_size = max(5, request["inputs"][varying[0]]["shape"][0]) if varying else None
    inputs = [example(given, any_size if place in varying else None) for place, given in enumerate(request["inputs"])]
    inputs += [torch.zeros((), dtype=torch.float64) for _ in request["scalars"]]
    for least in sizes:
        size = torch.export.Dim("batch", min=least)
        shapes = {"inputs": tuple({0: size} if place in varying else None for place in range(len(inputs)))}
        try:
            with torch.no_grad():
                return torch.export.export(Step(request), tuple(inputs), dynamic_shapes=shapes, strict=False), least
        except Exception:
            if least == sizes[-1]:
                raise


class VectorSets:
    """The vector instructions that the processor, the compiler and libtorch have. To see which, Inductor compiles a program
    and starts a Python for each set, in every process anew, which takes seconds, on some machines a minute. What it has
    found is noted in a file, where that is all that the processor has."""

    # Instructions beside a set's own.
    EXTRAS = ("_is_avx512_bf16_supported", "_is_amx_fp16_supported")

    def __init__(self, folder, machine):
        """`machine` describes the processor."""
        compiler = os.environ.get("CXX", "g++")
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
        self.names = cpu_vec_isa.x86_isa_checker()
        about = repr(("found", torch.__version__, version, machine)).encode()
        self.path = os.path.join(folder, f"vectors-{hashlib.sha256(about).hexdigest()}")
        # A variable of Inductor's may say instead which there are.
        self.asks = config.cpp.vec_isa_ok is None
        try:
            with open(self.path) as file:
                noted = json.load(file)
        except (OSError, ValueError):
            return
        found = [isa for isa in self.of_processor() if type(isa).__name__ in noted]
        if self.asks and found:
            for isa in found:
                vars(isa).update(noted[type(isa).__name__])
            cpu_vec_isa.valid_vec_isa_list = lambda: found

    def of_processor(self):
        return [isa for isa in cpu_vec_isa.supported_vec_isa_list if all(flag in self.names for flag in str(isa).split())]

    def note(self, folder):
        """Inductor has asked for them by now, so that nothing is started here."""
        found = cpu_vec_isa.valid_vec_isa_list()
        # Fewer may be the fault of this hour: no memory, a full disk.
        if not self.asks or not found or len(found) < len(self.of_processor()):
            return
        noted = {type(isa).__name__: {extra: getattr(isa, extra) for extra in self.EXTRAS if hasattr(isa, extra)}
                 for isa in found}
        part = os.path.join(folder, "vectors")
        try:
            with open(part, "w") as file:
                json.dump(noted, file)
            os.replace(part, self.path)
        except OSError:
            pass  # The next process asks again.


def keep_loops_of_lists():
    """Inductor 2.11 looks for another order of the loops of each kernel, and ends with an AssertionError at one for lists
    whose parts it has fused before. Those keep their order."""
    scheduler.ForeachKernelSchedulerNode.reorder_loops_by_dep_pair = lambda *_: False


def explained(path):
    """What the package's code calls: kernels that Inductor has fused, and operators of libtorch."""
    with zipfile.ZipFile(path) as package:
        code = "".join(package.read(name).decode() for name in package.namelist() if name.endswith(".wrapper.cpp"))
    calls = code[code.find("run_impl("):]
    fused = re.findall(r"\b((?:cpp_fused|triton)_\w+)\(", calls)
    operators = re.findall(r"\baoti_torch_(?:cpu|cuda)_(\w+)\(", calls)
    # Operators without a C function of their own.
    others = re.findall(r"\baoti_torch_(call_dispatcher|proxy_executor_call_function)\(", calls)
    return {"fused": sorted(set(fused)), "operators": Counter(operators + others)}


def main():
    record, folder, cache = sys.argv[1:]
    path, package = os.path.join(folder, "step.pt2"), io.BytesIO()
    with open(record) as file:
        record = json.load(file)
    request = record["request"]
    torch.set_num_threads(request["threads"])
    devices = {given["device"] for given in request["inputs"]}
    vectors = VectorSets(cache, record["machine"]) if "cpu" in devices else None
    # The generator of eager runs draws the same numbers. Dropout's masks come from a call that returns them: Inductor 2.11
    # draws them in place, and may fuse what reads a mask with what is before the draw.
    config.fallback_random = True
    lowering.make_fallback(torch.ops.aten.bernoulli.p, warn=False, override_decomp=True)
    keep_draws_in_order()
    # Inductor has this program compute their checksums.
    config.aot_inductor.precompile_headers &= shutil.which("openssl") is not None
    # Elsewhere in the folder for temporary files, which all users share.
    codecache._HEADER_DIR = os.path.join(cache, "inductor-headers")
    codecache._HEADER_LOCK_DIR = os.path.join(cache, "inductor-headers", "locks")
    if devices - {"cpu"}:
        find_cuda(folder)
        keep_loops_of_lists()
    if not vectors:
        # The host computes nothing.
        config.cpp.vec_isa_ok = False
    print("stage trace", flush=True)
    program, least = export(request)
    if least:
        config.aot_inductor.metadata = {"least_size": str(least)}
    print("stage compile", flush=True)
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=package)
    # Not by libtorch: its writer ends the process, without the reason, where the disk is full.
    with open(path, "wb") as file:
        file.write(package.getbuffer())
    with open(os.path.join(folder, "explain.json"), "w") as file:
        json.dump(explained(path), file)
    if vectors:
        vectors.note(folder)
    print("done", flush=True)


if __name__ == "__main__":
    main()
