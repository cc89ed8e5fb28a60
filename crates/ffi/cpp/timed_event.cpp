// CUDA events with timing. Uses c10's device interface, which needs no CUDA header or library.
#include <c10/core/Event.h>

#include "cuda_device.h"
#include "guarded.h"

struct od_timed_event {
  c10::Device device;
  c10::Event event;
};

od_status od_timed_event_new(int32_t device, od_timed_event** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    // PyTorch's default flag would turn timing off.
    *out = new od_timed_event{overdrive::cuda_device(device),
                              c10::Event(c10::DeviceType::CUDA, c10::EventFlag::BACKEND_DEFAULT)};
  });
}

void od_timed_event_free(od_timed_event* event) noexcept {
  if (event == nullptr) return;
  try {
    overdrive::on_device(event->device, [&] { delete event; });
  } catch (...) {
    // The device is lost, and the event with it.
  }
}

od_status od_timed_event_record(od_timed_event* event, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    overdrive::on_device(event->device, [&] { event->event.record(overdrive::current_stream(event->device)); });
  });
}

od_status od_timed_event_is_reached(const od_timed_event* event, int32_t* out, od_error* err) noexcept {
  return overdrive::guarded(
      err, [&] { *out = event->event.was_marked_for_recording() && event->event.query() ? 1 : 0; });
}

od_status od_timed_event_elapsed(const od_timed_event* from, const od_timed_event* to, double* milliseconds,
                                 od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    overdrive::on_device(from->device, [&] { *milliseconds = from->event.elapsedTime(to->event); });
  });
}
