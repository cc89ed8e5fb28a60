// What operators do to the memory of their results, as far as a record of a step has to know.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <string>

#include <unwind.h>

#include <ATen/core/dispatch/Dispatcher.h>

// Of torch-sys: makes a tensor of zeros, and copies the host's data over them.
extern "C" void* at_tensor_of_data(void* numbers, int64_t* dims, size_t ndims, size_t element_bytes, int type) noexcept;

namespace overdrive {

inline bool is_one_of(const std::string& name, std::initializer_list<const char*> names) {
  return std::any_of(names.begin(), names.end(), [&](const char* other) { return name == other; });
}

// Whether it allocates memory without writing to it. libtorch's own operators write to it afterwards, but a host that
// fills it does so without an operator.
inline bool leaves_uninitialised(const std::string& name) {
  return is_one_of(name, {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty",
                          "aten::new_empty_strided", "aten::empty_permuted"});
}

inline _Unwind_Reason_Code is_frame_of_host_data(_Unwind_Context* frame, void* found) {
  auto* at = reinterpret_cast<void*>(_Unwind_GetIP(frame));
  if (_Unwind_FindEnclosingFunction(at) != reinterpret_cast<void*>(&at_tensor_of_data)) return _URC_NO_REASON;
  *static_cast<bool*>(found) = true;
  return _URC_END_OF_STACK;
}

// Whether the operator is called to make a tensor of the host's data.
inline bool makes_host_data() {
  bool found = false;
  _Unwind_Backtrace(is_frame_of_host_data, &found);
  return found;
}

inline bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Whether it writes to an argument although its schema does not say so: running means and variances.
inline bool writes_unsaid(const std::string& name, size_t place) {
  return (place == 3 || place == 4) &&
         is_one_of(name, {"aten::native_batch_norm", "aten::cudnn_batch_norm", "aten::miopen_batch_norm"});
}

// Whether it writes to every element without reading any.
inline bool overwrites(const c10::OperatorHandle& op) {
  const auto& name = op.schema().name();
  return is_one_of(name, {"aten::fill_", "aten::zero_", "aten::copy_", "aten::normal_", "aten::uniform_",
                          "aten::bernoulli_", "aten::random_", "aten::exponential_", "aten::log_normal_",
                          "aten::cauchy_", "aten::geometric_"});
}

}  // namespace overdrive
