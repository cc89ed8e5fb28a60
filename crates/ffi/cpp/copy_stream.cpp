// Copies from the host to a GPU that overlap with the computation. Uses c10's device interface, which needs no CUDA
// header or library.
#include <ATen/Functions.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cuda_device.h"
#include "guarded.h"

namespace {

// Events that were waited for. Recording one again does not change what waits for it already.
struct IdleEvents {
  explicit IdleEvents(c10::Device device) : device(device) {}

  c10::Device device;
  std::mutex mutex;
  std::vector<c10::Event> events;

  ~IdleEvents() {
    try {
      overdrive::on_device(device, [&] { events.clear(); });
    } catch (...) {
      // The device is lost, and its events with it.
    }
  }

  std::optional<c10::Event> take() {
    std::lock_guard<std::mutex> lock(mutex);
    if (events.empty()) return std::nullopt;
    auto event = std::move(events.back());
    events.pop_back();
    return event;
  }

  void keep(c10::Event event) {
    std::lock_guard<std::mutex> lock(mutex);
    events.push_back(std::move(event));
  }
};

}  // namespace

struct od_copy_stream {
  c10::Stream stream;
  std::shared_ptr<IdleEvents> idle;
};

struct od_copy_event {
  c10::Event event;
  std::shared_ptr<IdleEvents> idle;
};

od_status od_copy_stream_new(int32_t device, od_copy_stream** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto cuda = overdrive::cuda_device(device);
    *out = new od_copy_stream{c10::impl::VirtualGuardImpl(cuda.type()).getStreamFromGlobalPool(cuda),
                              std::make_shared<IdleEvents>(cuda)};
  });
}

void od_copy_stream_free(od_copy_stream* stream) noexcept { delete stream; }

od_status od_copy_stream_upload(const od_copy_stream* stream, const at::Tensor* host, at::Tensor** out,
                                od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    c10::StreamGuard guard(stream->stream);
    *out = new at::Tensor(host->to(stream->stream.device(), host->scalar_type(), /*non_blocking=*/true));
  });
}

od_status od_copy_stream_record(const od_copy_stream* stream, od_copy_event** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto event = stream->idle->take();
    if (!event) event.emplace(c10::DeviceType::CUDA);
    overdrive::on_device(stream->stream.device(), [&] { event->record(stream->stream); });
    *out = new od_copy_event{std::move(*event), stream->idle};
  });
}

od_status od_copy_event_wait(od_copy_event* event, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto device = event->idle->device;
    overdrive::on_device(device, [&] { event->event.block(overdrive::current_stream(device)); });
  });
}

void od_copy_event_free(od_copy_event* event) noexcept {
  try {
    event->idle->keep(std::move(event->event));
  } catch (...) {
    // Without memory for the list, the event ends here.
  }
  delete event;
}

od_status od_copy_stream_adopt(const at::Tensor* tensor, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    TORCH_CHECK(tensor->is_cuda(), "a tensor on a CUDA device is needed, this one is on ", tensor->device());
    tensor->record_stream(overdrive::current_stream(tensor->device()));
  });
}
