// cuDNN is not there. What libtorch asks it for is launched as one kernel each, without libtorch's own code.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/stack.h>

namespace fakecuda {

struct Library {
  // The kernels that are launched, by the arguments.
  std::vector<std::string> (*kernels)(const torch::jit::Stack& arguments);
  // Results without numbers.
  std::vector<c10::IValue> (*allocate)(const torch::jit::Stack& arguments);
};

// Null if libtorch's own code is called.
const Library* library_of(const std::string& name);

}  // namespace fakecuda
