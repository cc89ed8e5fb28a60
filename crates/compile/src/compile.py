"""Compiles a recorded step: makes a graph of its operators and hands it to AOTInductor.

    python compile.py record.json folder cache

The record has the operators of `overdrive_ffi::record`, and what comes in and goes out. The folder gets `step.pt2`, the
package, and `explain.json`, what its code calls. The cache keeps what is found out about this machine. Says on stdout what it does, a
line each: `stage NAME`, and at the end `done`. Errors go to stderr.
"""

import sys

# Started by `python -c`, it would take a `json.py` of the current folder for a module.
sys.path = [path for path in sys.path if path]

import hashlib
import io
import json
import os
import re
import subprocess
import zipfile
from collections import Counter

import torch
import torch._inductor
from torch._inductor import config, cpu_vec_isa


def dtype(name):
    return getattr(torch, DTYPES[name])


DTYPES = {
    "Byte": "uint8", "Char": "int8", "Short": "int16", "Int": "int32", "Long": "int64", "Half": "float16",
    "Float": "float32", "Double": "float64", "Bool": "bool", "BFloat16": "bfloat16",
    "ComplexHalf": "complex32", "ComplexFloat": "complex64", "ComplexDouble": "complex128",
}
MEMORY_FORMATS = [torch.contiguous_format, torch.preserve_format, torch.channels_last, torch.channels_last_3d]


def adam(params, grads, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps, lr, beta1, beta2, weight_decay, eps,
         amsgrad=False, maximize=False, *, decoupled):
    """What `_fused_adam_` and `_fused_adamw_` compute, in operators that Inductor fuses."""
    # In tensors of their own: Inductor would compute the powers of 0-dim tensors again for each few elements.
    sizes = torch.stack([(lr / (1 - beta1 ** step.double())).to(params[0].dtype) for step in steps])
    scales = torch.stack([(1 - beta2 ** step.double()).sqrt().reciprocal().to(params[0].dtype) for step in steps])
    for i, (param, grad) in enumerate(zip(params, grads)):
        if maximize:
            grad = -grad
        if decoupled:
            param.mul_(1 - lr * weight_decay)
        else:
            grad = grad + param * weight_decay
        exp_avgs[i].add_((grad - exp_avgs[i]) * (1 - beta1))
        exp_avg_sqs[i].mul_(beta2).add_(grad * grad * (1 - beta2))
        second = exp_avg_sqs[i]
        if amsgrad:
            max_exp_avg_sqs[i].copy_(torch.maximum(max_exp_avg_sqs[i], second))
            second = max_exp_avg_sqs[i]
        param.sub_(sizes[i] * exp_avgs[i] / (second.sqrt() * scales[i] + eps))


def sgd(params, grads, momenta, weight_decay, momentum, lr, dampening, nesterov, maximize, is_first_step):
    """What `_fused_sgd_` computes."""
    for i, (param, grad) in enumerate(zip(params, grads)):
        if maximize:
            grad = -grad
        grad = grad + param * weight_decay
        if momenta:
            momenta[i].copy_(grad if is_first_step else momenta[i] * momentum + grad * (1 - dampening))
            grad = grad + momenta[i] * momentum if nesterov else momenta[i]
        param.sub_(grad * lr)


FORMULAS = {
    "aten::_fused_adam_": lambda *args: adam(*args, decoupled=False),
    "aten::_fused_adamw_": lambda *args: adam(*args, decoupled=True),
    "aten::_fused_sgd_": sgd,
}


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
        for at, node in enumerate(self.request["operators"]):
            try:
                self.call(at, node, tensors, scalars, size)
            except Exception as error:
                raise RuntimeError(f"operator {at}, {node['op']}.{node['overload']}: {error}; {node['args']}") from error
        return tuple(tensors[number] for number in self.request["outputs"])

    def call(self, at, node, tensors, scalars, size):
        args = [scalars.get((at, i), value(arg, tensors, size)) for i, arg in enumerate(node["args"])]
        formula = FORMULAS.get(node["op"])
        if formula:
            while args and args[-1] is None:
                args.pop()
            return formula(*args)
        op = operator(node["op"], node["overload"])
        results = op(*positional(op, args), **by_name(op, args))
        bind(node["out"], [results] if len(op._schema.returns) == 1 else results, tensors)


def positional(op, args):
    return [arg for arg, declared in zip(args, op._schema.arguments) if not declared.kwarg_only]


def by_name(op, args):
    return {declared.name: arg for arg, declared in zip(args, op._schema.arguments) if declared.kwarg_only}


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


def example(given):
    return torch.empty_strided(given["shape"], given["stride"], dtype=dtype(given["dtype"]), device=given["device"])


class VectorSets:
    """The processor's vector instructions. To see whether the compiler and libtorch have them, Inductor starts a Python
    for each set, in every process anew, which takes seconds. That all of them work is noted in a file."""

    def __init__(self, folder):
        compiler = os.environ.get("CXX", "g++")
        version = subprocess.run([compiler, "--version"], capture_output=True, check=True).stdout
        self.names = cpu_vec_isa.x86_isa_checker()
        about = repr((torch.__version__, version, self.names)).encode()
        self.path = os.path.join(folder, f"vectors-{hashlib.sha256(about).hexdigest()}")
        if os.path.exists(self.path):
            config.cpp.vec_isa_ok = True

    def note(self):
        """Inductor has asked for each by now, so that nothing is started here."""
        own = [isa for isa in cpu_vec_isa.supported_vec_isa_list if all(flag in self.names for flag in str(isa).split())]
        if all(own):
            open(self.path, "w").close()


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
        request = json.load(file)["request"]
    torch.set_num_threads(request["threads"])
    vectors = VectorSets(cache)
    # The generator of eager runs draws the same numbers.
    config.fallback_random = True
    inputs = [example(given) for given in request["inputs"]]
    inputs += [torch.zeros((), dtype=torch.float64) for _ in request["scalars"]]
    size = torch.export.Dim("batch", min=2)
    varying = request.get("batch", [])
    shapes = {"inputs": tuple({0: size} if place in varying else None for place in range(len(inputs)))}
    print("stage trace", flush=True)
    with torch.no_grad():
        program = torch.export.export(Step(request), tuple(inputs), dynamic_shapes=shapes, strict=False)
    print("stage compile", flush=True)
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=package)
    # Not by libtorch: its writer ends the process, without the reason, where the disk is full.
    with open(path, "wb") as file:
        file.write(package.getbuffer())
    with open(os.path.join(folder, "explain.json"), "w") as file:
        json.dump(explained(path), file)
    vectors.note()
    print("done", flush=True)


if __name__ == "__main__":
    main()
