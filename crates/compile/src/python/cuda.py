"""What a package for a GPU is compiled with, where only pip's packages of CUDA and the driver are installed."""

import os

import torch
from torch.utils import cpp_extension


def find_cuda(request, folder):
    """For a step on a GPU, sets what Inductor finds CUDA's headers by, and what the linker finds the driver's library by. A link to the library
    that this process uses lies in the folder: containers often lack the name that a linker looks for."""
    if all(given["device"] == "cpu" for given in request["inputs"]):
        return
    if not cpp_extension.CUDA_HOME:
        packages = os.path.dirname(torch.__path__[0])
        home = os.path.join(packages, "nvidia", f"cu{torch.version.cuda.split('.')[0]}")
        if not os.path.exists(os.path.join(home, "include", "cuda.h")):
            raise RuntimeError(f"CUDA's headers are neither in a toolkit nor in {home}: set CUDA_HOME, or install "
                               "cuda-toolkit by pip")
        cpp_extension.CUDA_HOME = os.environ["CUDA_HOME"] = home
    torch.cuda.init()
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/libcuda.so" in line}
    if not paths:
        return
    link = os.path.join(folder, "libcuda.so")
    os.symlink(min(paths), link)
    os.environ["LIBRARY_PATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("LIBRARY_PATH")]))
