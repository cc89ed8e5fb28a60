#pragma once

#include <ATen/Context.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

// Of cuda_missing.rs.
extern "C" const char* od_cuda_why_unavailable() noexcept;

namespace overdrive {

// The CUDA device with this number, initialised; throws when there is none. Uses c10's device interface, which needs no
// CUDA header or library.
inline c10::Device cuda_device(int32_t number) {
  TORCH_CHECK(at::hasCUDA(), "no CUDA device was found: ", od_cuda_why_unavailable());
  int32_t count = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).deviceCount();
  TORCH_CHECK(number >= 0 && number < count, "CUDA device ", number, " does not exist; this machine has ", count);
  at::globalContext().lazyInitDevice(at::kCUDA);
  return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(number)};
}

inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

// Runs a body that records, awaits, reads or destroys an event of this device. c10's events set their device and then
// the thread's one again, and from CUDA 12 on that makes a context on it. A guard does not return to a device without a
// context.
template <typename Body>
void on_device(c10::Device device, Body&& body) {
  c10::DeviceGuard guard(device);
  body();
}

}  // namespace overdrive
