// The arguments of an operator as tensors of the host over a fake device's memory.
#pragma once

#include <vector>

#include <ATen/ATen.h>
#include <ATen/core/stack.h>

#include "runtime.h"

namespace fakecuda {

// The host's own operators, without autograd and autocast: what those had to do was done when the operator was called.
class OnHost {
  c10::impl::ForceDispatchKeyGuard keys_{
      c10::DispatchKeySet(c10::DispatchKey::BackendSelect),
      c10::autograd_dispatch_keyset_with_ADInplaceOrView | c10::autocast_dispatch_keyset};
};

inline bool on_device(const at::Tensor& tensor) { return tensor.defined() && tensor.is_cuda(); }

// From the first element to the last one, with what lies between them.
inline size_t span(const at::Tensor& tensor) {
  if (tensor.numel() == 0) return 0;
  int64_t last = 0;
  for (int64_t dim = 0; dim < tensor.dim(); ++dim) last += (tensor.size(dim) - 1) * tensor.stride(dim);
  return static_cast<size_t>(last + 1) * tensor.element_size();
}

// How many bytes the memory behind a value has on the device.
inline size_t bytes_behind(const c10::IValue& value) {
  if (!value.isTensor() || !on_device(value.toTensor()) || !value.toTensor().has_storage()) return 0;
  return value.toTensor().storage().nbytes();
}

// What an operator does with an argument, or with a result, which is new.
enum class Use { READ, UPDATE, RESULT };

inline void add_range(const at::Tensor& tensor, Use use, std::vector<fakecuda_range>& ranges) {
  if (!on_device(tensor) || tensor.numel() == 0) return;
  ranges.push_back(
      {tensor.const_data_ptr(), span(tensor), tensor.element_size(), use != Use::RESULT, use != Use::READ});
}

// A tensor of the host over the same bytes. It does not keep the device's memory: if that is freed and used again before
// the operator's turn comes, the operator sees the new bytes, as on a device.
inline at::Tensor over(const at::Tensor& tensor) {
  auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  return at::from_blob(fakecuda_host(tensor.const_data_ptr()), tensor.sizes(), tensor.strides(), options);
}

// The host's own tensors are read when the operator is called: a kernel gets their values as arguments. Pinned ones are
// read when its turn comes.
inline at::Tensor of_host(const at::Tensor& tensor, Use use) {
  if (!tensor.defined()) return tensor;
  if (use != Use::READ || (tensor.numel() > 0 && tensor.is_pinned())) return over(tensor);
  auto copy = tensor.clone();
  // Python's numbers take part in type promotion in another way than tensors do.
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) copy.unsafeGetTensorImpl()->set_wrapped_number(true);
  return copy;
}

// A sparse tensor (COO) over the same indices and values.
inline at::Tensor over_sparse(const at::Tensor& tensor, Use use, std::vector<fakecuda_range>& ranges) {
  TORCH_CHECK(use != Use::UPDATE, "the stand-in computes no update of a sparse tensor in place");
  auto indices = tensor._indices(), values = tensor._values();
  add_range(indices, use, ranges);
  add_range(values, use, ranges);
  auto options = values.options().device(at::kCPU).layout(at::kSparse);
  return at::_sparse_coo_tensor_unsafe(over(indices), over(values), tensor.sizes(), options, tensor.is_coalesced());
}

inline c10::IValue snapshot(const c10::IValue& value, Use use, std::vector<fakecuda_range>& ranges) {
  if (value.isTensor()) {
    const auto& tensor = value.toTensor();
    if (!on_device(tensor)) return of_host(tensor, use);
    if (tensor.is_sparse()) return over_sparse(tensor, use, ranges);
    add_range(tensor, use, ranges);
    return over(tensor);
  }
  if (value.isList() && !value.isIntList() && !value.isDoubleList() && !value.isBoolList()) {
    auto list = value.toList();
    c10::impl::GenericList copy(list.elementType());
    copy.reserve(list.size());
    for (const c10::IValue& item : list) copy.push_back(snapshot(item, use, ranges));
    return copy;
  }
  if (value.isDevice()) return c10::Device(at::kCPU);
  // The device's: `Draws` has its numbers.
  if (value.isGenerator()) return {};
  return value;
}

}  // namespace fakecuda
