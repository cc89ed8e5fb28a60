#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <dlfcn.h>

#include "guarded.h"

od_status od_use_one_thread(int32_t* used, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    // libtorch sets a thread's number when the thread first asks: afterwards ours stays.
    at::get_num_threads();
    // at::set_num_threads would also tell every thread to come. OpenMP keeps the number by thread, and its library comes
    // with libtorch under a name that varies.
    auto set = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
    if (set != nullptr) set(1);
    *used = at::get_num_threads() == 1;
  });
}

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
