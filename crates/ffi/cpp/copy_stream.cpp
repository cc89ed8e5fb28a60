// Copies from the host to a GPU beside the computation. Through c10's own interface to devices, which needs no header or
// library of CUDA.
#include <ATen/Context.h>
#include <ATen/Functions.h>
#include <c10/core/Event.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "guarded.h"

struct od_copy_stream {
  c10::Stream stream;
};

struct od_copy_event {
  c10::Event event;
};

namespace {

c10::Stream current_stream(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStream(device);
}

}  // namespace

od_status od_copy_stream_new(int32_t device, od_copy_stream** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    TORCH_CHECK(at::hasCUDA(), "no CUDA device was found");
    c10::impl::VirtualGuardImpl guard(c10::DeviceType::CUDA);
    int32_t count = guard.deviceCount();
    TORCH_CHECK(device >= 0 && device < count, "CUDA device ", device, " does not exist; this machine has ", count);
    at::globalContext().lazyInitDevice(at::kCUDA);
    c10::Device cuda(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device));
    *out = new od_copy_stream{guard.getStreamFromGlobalPool(cuda)};
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
    c10::Event event(c10::DeviceType::CUDA);
    event.record(stream->stream);
    *out = new od_copy_event{std::move(event)};
  });
}

od_status od_copy_event_wait(od_copy_event* event, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { event->event.block(current_stream(event->event.device())); });
}

void od_copy_event_free(od_copy_event* event) noexcept { delete event; }

od_status od_copy_stream_adopt(const at::Tensor* tensor, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    TORCH_CHECK(tensor->is_cuda(), "a tensor on a CUDA device is needed, this one is on ", tensor->device());
    tensor->record_stream(current_stream(tensor->device()));
  });
}
