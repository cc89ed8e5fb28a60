"""Calls the gradients of convolutions as compiled steps do: by libtorch's C functions, which no dispatcher sees."""

import ctypes
import os
import sys

import torch
from torch.nn import functional

LIBTORCH = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cuda.so")


def handle(tensor):
    (pointer,) = torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors([tensor])
    get = ctypes.pythonapi.PyCapsule_GetPointer
    get.restype, get.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return ctypes.c_void_p(get(pointer, None))


def tensor_of(pointer):
    new = ctypes.pythonapi.PyCapsule_New
    new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(new(pointer, None, None))


def pair(value):
    return (ctypes.c_int64 * 2)(value, value), ctypes.c_int64(2)


def gradients(grad, inputs, weight, stride, padding, transposed, groups):
    function = ctypes.CDLL(LIBTORCH).aoti_torch_cuda_convolution_backward
    bias = ctypes.pointer(ctypes.pointer((ctypes.c_int64 * 1)(grad.size(1))))
    results = [ctypes.c_void_p() for _ in range(3)]
    error = function(
        handle(grad), handle(inputs), handle(weight), bias, ctypes.c_int64(1), *pair(stride), *pair(padding), *pair(1),
        ctypes.c_int32(transposed), *pair(0), ctypes.c_int64(groups), (ctypes.c_int32 * 3)(1, 1, 1), ctypes.c_int64(3),
        *map(ctypes.byref, results))
    if error:
        sys.exit("it is refused")
    return [tensor_of(result) for result in results]


def main():
    runtime = ctypes.CDLL("libcudart.so.13")
    runtime.fakecuda_counts.restype = runtime.fakecuda_notes.restype = ctypes.c_char_p
    ctypes.CDLL(os.environ["FAKECUDA_OPERATORS"])
    torch.manual_seed(1)
    for stride, padding, transposed, groups in [(1, 1, False, 1), (2, 0, False, 2), (2, 1, True, 1)]:
        inputs = torch.randn(2, 4, 9, 9, requires_grad=True)
        weight = torch.randn(*(4, 6 // groups) if transposed else (6, 4 // groups), 3, 3, requires_grad=True)
        bias = torch.randn(6, requires_grad=True)
        convolve = functional.conv_transpose2d if transposed else functional.conv2d
        outputs = convolve(inputs, weight, bias, stride, padding, groups=groups)
        grad = torch.randn_like(outputs)
        expected = torch.autograd.grad(outputs, [inputs, weight, bias], grad)
        on_device = [it.detach().cuda() for it in (grad, inputs, weight)]
        runtime.fakecuda_reset()
        found = gradients(*on_device, stride, padding, transposed, groups)
        names = [line for line in runtime.fakecuda_counts().decode().splitlines() if "cudnn" in line]
        wanted = [f"kernel cudnn convolution, gradient of the {of}: 1" for of in ("input", "weight")]
        if sorted(names) != wanted:
            sys.exit(f"{names}")
        for name, found, expected in zip(("input", "weight", "bias"), found, expected):
            if not torch.allclose(found.cpu(), expected, rtol=1e-4, atol=1e-4):
                sys.exit(f"transposed: {transposed}: the gradient of the {name} differs")
        notes = runtime.fakecuda_notes().decode()
        if notes:
            sys.exit(notes)
        print("right", flush=True)


if __name__ == "__main__":
    main()
