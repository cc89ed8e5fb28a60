// The memory of tensors.
#pragma once

#include <ATen/core/Tensor.h>

namespace overdrive {

inline bool has_storage(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.has_storage();
}

// The memory that a tensor is a part of.
inline at::StorageImpl& storage_of(const at::Tensor& tensor) {
  return *tensor.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// Whether two tensors are parts of one memory. Two storages may be of one buffer: tensors made of a slice that somebody
// else owns.
inline bool share_memory(const at::Tensor& one, const at::Tensor& other) {
  if (!has_storage(one) || !has_storage(other)) return false;
  // Where memory is not there (on_demand.cpp), reading it throws.
  auto begin = [](at::StorageImpl& storage) {
    return static_cast<const char*>(storage._mutable_data_ptr_no_checks().get());
  };
  auto &a = storage_of(one), &b = storage_of(other);
  if (&a == &b) return a.nbytes() > 0;
  if (begin(a) == nullptr || begin(b) == nullptr) return false;
  return begin(a) < begin(b) + b.nbytes() && begin(b) < begin(a) + a.nbytes();
}

}  // namespace overdrive
