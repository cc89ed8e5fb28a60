#include <ATen/Functions.h>

#include "guarded.h"

od_status od_empty_pinned(const int64_t* shape, size_t n_dims, int32_t scalar_type, at::Tensor** out,
                          od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(scalar_type)).pinned_memory(true);
    *out = new at::Tensor(at::empty(at::IntArrayRef(shape, n_dims), options));
  });
}

od_status od_host_buffer(int64_t bytes, int32_t pinned, at::Tensor** out, uint8_t** data, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto tensor = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(pinned != 0));
    *data = tensor.data_ptr<uint8_t>();
    *out = new at::Tensor(std::move(tensor));
  });
}
