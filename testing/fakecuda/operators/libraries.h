// cuDNN and cuSOLVER are not there. What libtorch asks them for is launched as a kernel each, without libtorch's own
// code.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/stack.h>

namespace fakecuda {

struct Library {
  // cuDNN can be switched off.
  bool is_cudnn;
  // The kernels that are launched, by the arguments.
  std::vector<std::string> (*kernels)(const torch::jit::Stack& arguments);
  // Results without numbers.
  std::vector<c10::IValue> (*allocate)(const torch::jit::Stack& arguments);
};

// Null if libtorch's own code is called.
const Library* library_of(const std::string& name);

}  // namespace fakecuda
