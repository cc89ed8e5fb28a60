// Operators that exist on CUDA alone, as formulas on the host.
#pragma once

#include <string>

#include <ATen/core/stack.h>

namespace fakecuda {

// Takes an operator's arguments from the end of the stack, and puts its results there.
using Formula = void (*)(torch::jit::Stack&);

// Null if the operator of this name (`aten::cudnn_convolution`) is the host's own too.
Formula formula_of(const std::string& name);

}  // namespace fakecuda
