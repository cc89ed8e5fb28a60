// Operators that return a size or an answer which the host learns from the device: libtorch's own code would read it from a
// kernel that does not run.
#pragma once

#include <string>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>

namespace fakecuda {

// Whether the operator of this name (`aten::nonzero`) is one of them.
bool is_decided_on_host(const std::string& name);

// Counts two kernels and a wait for the stream, where the results are computed on the host: it has read whatever nobody
// computed then.
void decide_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack);

}  // namespace fakecuda
