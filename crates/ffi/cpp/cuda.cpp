// Functions that need CUDA's headers.
#include <cstring>
#include <mutex>
#include <optional>
#include <string>

#include <ATen/Functions.h>
#include <ATen/cuda/CUDAContext.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <torch/csrc/cuda/memory_snapshot.h>

#include "allocations.h"
#include "guarded.h"

namespace {

at::DeviceIndex checked(int32_t device) {
  int32_t count = at::cuda::device_count();
  TORCH_CHECK(device >= 0 && device < count, "CUDA device ", device, " does not exist; this machine has ", count);
  return static_cast<at::DeviceIndex>(device);
}

// The allocator has no statistics before CUDA is initialised.
c10::DeviceIndex initialised(int32_t device) {
  auto index = checked(device);
  at::globalContext().lazyInitDevice(at::kCUDA);
  return index;
}

void report_entry(const c10::CachingDeviceAllocator::TraceEntry& entry) {
  using Entry = c10::CachingDeviceAllocator::TraceEntry;
  bool is_new = entry.action_ == Entry::ALLOC;
  if (!is_new && entry.action_ != Entry::FREE_COMPLETED) return;
  overdrive::report(is_new ? OD_ALLOCATED : OD_FREED, reinterpret_cast<const void*>(entry.addr_), entry.size_,
                    entry.device_);
}

}  // namespace

void overdrive::watch_device_memory() {
  static std::once_flag attached;
  if (at::cuda::device_count() == 0) return;
  at::globalContext().lazyInitDevice(at::kCUDA);
  // It stays attached, because libtorch cannot detach it.
  std::call_once(attached, [] {
    try {
      c10::cuda::CUDACachingAllocator::attachAllocatorTraceTracker(&report_entry);
    } catch (const c10::Error&) {
      // `backend:cudaMallocAsync` does not support trackers. The host's memory is watched all the same.
    }
  });
}

int32_t od_cuda_compiled(void) noexcept { return 1; }

od_status od_cuda_device_name(int32_t device, char** out, od_error* err) noexcept {
  return overdrive::guarded(
      err, [&] { *out = overdrive::copy_string(at::cuda::getDeviceProperties(checked(device))->name); });
}

od_status od_cuda_device_uuid(int32_t device, uint8_t* out, od_error* err) noexcept {
  return overdrive::guarded(
      err, [&] { std::memcpy(out, at::cuda::getDeviceProperties(checked(device))->uuid.bytes, 16); });
}

od_status od_cuda_device_capability(int32_t device, int32_t* major, int32_t* minor, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    const auto* properties = at::cuda::getDeviceProperties(checked(device));
    *major = properties->major;
    *minor = properties->minor;
  });
}

od_status od_cuda_memory_stats(int32_t device, od_memory_stats* out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto stats = c10::cuda::CUDACachingAllocator::getDeviceStats(initialised(device));
    constexpr auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    *out = {stats.allocated_bytes[all].current, stats.allocated_bytes[all].peak, stats.reserved_bytes[all].current,
            stats.reserved_bytes[all].peak, stats.num_alloc_retries};
  });
}

od_status od_cuda_reset_peak_memory_stats(int32_t device, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { c10::cuda::CUDACachingAllocator::resetPeakStats(initialised(device)); });
}

od_status od_cuda_empty_cache(od_error* err) noexcept {
  return overdrive::guarded(err, [&] { c10::cuda::CUDACachingAllocator::emptyCache(); });
}

od_status od_cuda_set_memory_fraction(int32_t device, double fraction, od_error* err) noexcept {
  return overdrive::guarded(
      err, [&] { c10::cuda::CUDACachingAllocator::setMemoryFraction(fraction, initialised(device)); });
}

od_status od_cuda_record_memory_history(int32_t enabled, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    initialised(0);
    auto state = enabled != 0 ? std::optional<std::string>("all") : std::nullopt;
    torch::cuda::_record_memory_history(state, state, "all");
  });
}

od_status od_cuda_memory_snapshot(at::Tensor** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    initialised(0);
    auto snapshot = torch::cuda::_memory_snapshot_pickled();
    auto bytes = at::empty({static_cast<int64_t>(snapshot.size())}, at::kByte);
    std::memcpy(bytes.mutable_data_ptr(), snapshot.data(), snapshot.size());
    *out = new at::Tensor(std::move(bytes));
  });
}

od_status od_cuda_set_allocator_settings(const char* settings, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { c10::CachingAllocator::setAllocatorSettings(settings); });
}

od_status od_cuda_set_sync_debug_mode(int32_t mode, int32_t* previous, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    TORCH_CHECK(mode >= 0 && mode <= 2, "sync debug mode ", mode, " should be 0 (off), 1 (warn) or 2 (error)");
    auto& state = c10::cuda::warning_state();
    *previous = static_cast<int32_t>(state.get_sync_debug_mode());
    state.set_sync_debug_mode(static_cast<c10::cuda::SyncDebugMode>(mode));
  });
}
