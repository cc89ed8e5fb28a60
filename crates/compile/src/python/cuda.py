"""What a package for a GPU is compiled with, where only pip's packages of CUDA and the driver are installed."""

import os

import torch
from torch.utils import cpp_extension


def find_cuda(folder):
    """For a step on a GPU, sets what Inductor finds CUDA's headers by, and what the linker finds the driver's library by. A
    link to the library that this process uses lies in the folder: containers often lack the name that a linker looks for."""
    if torch.version.cuda is None:
        raise RuntimeError(f"this Python has a build of torch without CUDA ({torch.__version__}): set OVERDRIVE_PYTHON to one "
                           "with it")
    packages = os.path.join(os.path.dirname(torch.__path__[0]), "nvidia", f"cu{torch.version.cuda.split('.')[0]}")
    homes = [home for home in (cpp_extension.CUDA_HOME, packages) if home]
    found = [home for home in homes if os.path.exists(os.path.join(home, "include", "cuda.h"))]
    if not found:
        raise RuntimeError(f"CUDA's headers are not in {' nor in '.join(homes)}: set CUDA_HOME to a toolkit, or install "
                           "cuda-toolkit by pip")
    cpp_extension.CUDA_HOME = os.environ["CUDA_HOME"] = found[0]
    torch.cuda.init()
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[5].strip() for line in maps if "/libcuda.so" in line}
    if paths:
        os.symlink(min(paths), os.path.join(folder, "libcuda.so"))
        os.environ["LIBRARY_PATH"] = os.pathsep.join(filter(None, [folder, os.environ.get("LIBRARY_PATH")]))


