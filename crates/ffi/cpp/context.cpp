#include <ATen/Context.h>

#include "guarded.h"

od_status od_get_allow_tf32(int32_t* out, od_error* err) noexcept {
  return overdrive::guarded(
      err, [&] { *out = at::globalContext().allowTF32CuBLAS() && at::globalContext().allowTF32CuDNN(); });
}

od_status od_set_allow_tf32(int32_t allow, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    at::globalContext().setAllowTF32CuBLAS(allow != 0);
    at::globalContext().setAllowTF32CuDNN(allow != 0);
  });
}
