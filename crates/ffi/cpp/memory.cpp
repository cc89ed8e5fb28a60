#include <ATen/Functions.h>

#include "guarded.h"

od_status od_empty_pinned(const int64_t* shape, size_t n_dims, int32_t scalar_type, at::Tensor** out,
                          od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(scalar_type)).pinned_memory(true);
    *out = new at::Tensor(at::empty(at::IntArrayRef(shape, n_dims), options));
  });
}
