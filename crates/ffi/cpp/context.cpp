#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/core/Generator.h>
#include <ATen/detail/AcceleratorHooksInterface.h>
#include <c10/core/GradMode.h>
#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "cuda_device.h"
#include "guarded.h"
#include "record.h"

namespace {

std::atomic<uint64_t> sets_of_generators{0};

at::Generator generator(int32_t device_type, int32_t index) {
  // An index is eight bits wide, and must not wrap to a device that exists.
  TORCH_CHECK(index >= -1 && index <= 127, "there is no device ", index);
  at::Device device(static_cast<at::DeviceType>(device_type), static_cast<at::DeviceIndex>(index));
  if (!device.is_cpu()) {
    TORCH_CHECK(at::globalContext().hasCUDA(), "there is no CUDA device: ", od_cuda_why_unavailable());
    auto count = at::globalContext().getAcceleratorHooksInterface(device.type()).deviceCount();
    TORCH_CHECK(index >= 0 && index < count, "CUDA device ", index, " does not exist; this machine has ", count);
  }
  return at::globalContext().defaultGenerator(device);
}

}  // namespace

int32_t od_grad_enabled() noexcept { return c10::GradMode::is_enabled(); }

od_status od_use_one_thread(int32_t* used, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    // libtorch sets a thread's number of OpenMP threads at its first call: call it once, so that our number stays.
    at::get_num_threads();
    // at::set_num_threads would also apply to all threads started later. OpenMP keeps the number per thread; its
    // library comes with libtorch under a varying name, hence dlsym.
    auto set = reinterpret_cast<void (*)(int)>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
    if (set != nullptr) set(1);
    *used = at::get_num_threads() == 1;
  });
}

od_status od_matmul_allow_tf32(int32_t* out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { *out = at::globalContext().allowTF32CuBLAS(); });
}

od_status od_set_matmul_allow_tf32(int32_t allow, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { at::globalContext().setAllowTF32CuBLAS(allow != 0); });
}

od_status od_cudnn_allow_tf32(int32_t* out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { *out = at::globalContext().allowTF32CuDNN(); });
}

od_status od_set_cudnn_allow_tf32(int32_t allow, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { at::globalContext().setAllowTF32CuDNN(allow != 0); });
}

od_status od_rng_state(int32_t device_type, int32_t index, at::Tensor** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto rng = generator(device_type, index);
    std::lock_guard<std::mutex> lock(rng.mutex());
    *out = new at::Tensor(rng.get_state());
  });
}

od_status od_cuda_used(uint64_t* devices, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    *devices = 0;
    if (!at::globalContext().hasCUDA()) return;
    const auto& hooks = at::globalContext().getAcceleratorHooksInterface(at::kCUDA);
    int count = std::min<int>(hooks.deviceCount(), 64);
    for (int device = 0; device < count; ++device)
      if (hooks.hasPrimaryContext(static_cast<at::DeviceIndex>(device))) *devices |= uint64_t{1} << device;
  });
}

od_status od_set_rng_state(int32_t device_type, int32_t index, const at::Tensor* state, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    TORCH_CHECK(state->defined() && state->device().is_cpu() && state->scalar_type() == at::kByte,
                "a generator's state should be a uint8 tensor on the host");
    auto rng = generator(device_type, index);
    std::lock_guard<std::mutex> lock(rng.mutex());
    rng.set_state(state->contiguous());
    ++sets_of_generators;
  });
}

uint64_t overdrive::generator_sets() noexcept { return sets_of_generators; }
