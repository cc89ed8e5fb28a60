// Replaces cuda.cpp where libtorch has no CUDA or its headers were not found at build time: each call returns an error
// that says so.
#include "allocations.h"
#include "guarded.h"

namespace {

od_status absent(od_error* err) noexcept {
  const char* message =
      "built without CUDA: libtorch has no libtorch_cuda or the CUDA headers were not found at build time "
      "(run `cargo xtask setup`, or pip install nvidia-cuda-crt and nvidia-cuda-cccl next to torch, and build again)";
  return overdrive::fail(err, OD_CUDA, message, message);
}

}  // namespace

void overdrive::watch_device_memory() {}

int32_t od_cuda_compiled(void) noexcept { return 0; }
od_status od_cuda_device_name(int32_t, char**, od_error* err) noexcept { return absent(err); }
od_status od_cuda_device_uuid(int32_t, uint8_t*, od_error* err) noexcept { return absent(err); }
od_status od_cuda_device_capability(int32_t, int32_t*, int32_t*, od_error* err) noexcept { return absent(err); }
od_status od_cuda_memory_stats(int32_t, od_memory_stats*, od_error* err) noexcept { return absent(err); }
od_status od_cuda_reset_peak_memory_stats(int32_t, od_error* err) noexcept { return absent(err); }
od_status od_cuda_empty_cache(od_error* err) noexcept { return absent(err); }
od_status od_cuda_set_memory_fraction(int32_t, double, od_error* err) noexcept { return absent(err); }
od_status od_cuda_record_memory_history(int32_t, od_error* err) noexcept { return absent(err); }
od_status od_cuda_memory_snapshot(at::Tensor**, od_error* err) noexcept { return absent(err); }
od_status od_cuda_set_allocator_settings(const char*, od_error* err) noexcept { return absent(err); }
od_status od_cuda_set_sync_debug_mode(int32_t, int32_t*, od_error* err) noexcept { return absent(err); }
