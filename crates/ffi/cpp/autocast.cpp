// Sets and restores autocast's thread-local state as one unit, as torch.amp.autocast_mode does in Python.
#include <ATen/autocast_mode.h>

#include "guarded.h"

namespace {

od_autocast_state read(int32_t device_type) {
  auto device = static_cast<at::DeviceType>(device_type);
  return {device_type, at::autocast::is_autocast_enabled(device),
          static_cast<int32_t>(at::autocast::get_autocast_dtype(device)), at::autocast::is_autocast_cache_enabled()};
}

void write(const od_autocast_state& state) {
  auto device = static_cast<at::DeviceType>(state.device_type);
  at::autocast::set_autocast_enabled(device, state.enabled != 0);
  at::autocast::set_autocast_dtype(device, static_cast<at::ScalarType>(state.scalar_type));
  at::autocast::set_autocast_cache_enabled(state.cache_enabled != 0);
}

}  // namespace

od_status od_autocast_get(int32_t device_type, od_autocast_state* out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { *out = read(device_type); });
}

od_status od_autocast_enter(const od_autocast_state* wanted, od_autocast_state* previous, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    *previous = read(wanted->device_type);
    write(*wanted);
    at::autocast::increment_nesting();
  });
}

od_status od_autocast_exit(const od_autocast_state* previous, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    // The outermost exit drops the cast copies of the weights: the optimizer is about to change the originals.
    if (at::autocast::decrement_nesting() == 0) at::autocast::clear_cache();
    write(*previous);
  });
}
