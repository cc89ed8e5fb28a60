#pragma once

#include <ATen/Context.h>
#include <c10/core/impl/VirtualGuardImpl.h>

namespace overdrive {

// The CUDA device with this number, ready for use; throws when there is none. Through c10's own interface to devices, which
// needs no header or library of CUDA.
inline c10::Device cuda_device(int32_t number) {
  TORCH_CHECK(at::hasCUDA(), "no CUDA device was found");
  int32_t count = c10::impl::VirtualGuardImpl(c10::DeviceType::CUDA).deviceCount();
  TORCH_CHECK(number >= 0 && number < count, "CUDA device ", number, " does not exist; this machine has ", count);
  at::globalContext().lazyInitDevice(at::kCUDA);
  return {c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(number)};
}

inline c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace overdrive
