// Copies from the host to a GPU that overlap with the computation. Uses c10's device interface, which needs no CUDA
// header or library.
#include <ATen/Functions.h>
#include <c10/core/StreamGuard.h>

#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "cuda_device.h"
#include "event_pool.h"
#include "guarded.h"

namespace {

using overdrive::on_device;

// The state that the copies of a stream share.
class Copies {
 public:
  explicit Copies(c10::Stream stream) : stream(stream), idle_(stream.device()) {}

  ~Copies() {
    try {
      on_device(stream.device(), [&] { reuse_returned(); });
    } catch (...) {
      // The device is lost, and its events and memory with it.
    }
  }

  const c10::Stream stream;

  c10::Event record() {
    auto event = idle_.take();
    on_device(stream.device(), [&] { event.record(stream); });
    return event;
  }

  void keep(c10::Event event) { idle_.give(std::move(event)); }

  // The number of the batch that begins to be used. A copy that nobody has begun to use has 0.
  uint64_t next_batch() {
    std::lock_guard<std::mutex> lock(mutex_);
    on_device(stream.device(), [&] { reuse_returned(); });
    return ++batch_;
  }

  // The memory of a copy that `user`'s stream has used until now. Before the copy stream writes to it again, it waits
  // for that. The wait comes with the next batch: if it came at once, the next copy would not overlap with the
  // computation of this batch.
  void take_back(c10::DataPtr memory, const c10::Stream& user, uint64_t batch) {
    std::lock_guard<std::mutex> lock(mutex_);
    on_device(stream.device(), [&] {
      auto event = idle_.take();
      event.record(user);
      returned_.emplace_back(std::move(memory), std::move(event));
      if (batch != batch_) reuse_returned();
    });
  }

 private:
  void reuse_returned() {
    for (auto& [memory, event] : returned_) {
      event.block(stream);
      idle_.give(std::move(event));
    }
    returned_.clear();
  }

  overdrive::EventPool idle_;
  std::mutex mutex_;
  std::vector<std::pair<c10::DataPtr, c10::Event>> returned_;
  uint64_t batch_ = 1;
};

// The owner of a copy's storage: its memory, and who uses it. With `record_stream`, the allocator would reuse memory
// only when it sees that the device has passed the last use, which takes one more batch of memory for each step that
// the host is ahead.
struct Lent {
  c10::DataPtr memory;
  std::shared_ptr<Copies> copies;
  std::optional<c10::Stream> user;
  uint64_t batch = 0;
};

void give_back(void* context) noexcept {
  std::unique_ptr<Lent> lent(static_cast<Lent*>(context));
  if (!lent->user) return;
  try {
    lent->copies->take_back(std::move(lent->memory), *lent->user, lent->batch);
  } catch (...) {
    // The device is lost.
  }
}

void lend(const at::Tensor& copy, std::shared_ptr<Copies> copies) {
  if (!copy.has_storage() || copy.storage().data() == nullptr) return;
  auto lent = std::make_unique<Lent>();
  lent->copies = std::move(copies);
  auto* data = copy.storage().mutable_data();
  c10::DataPtr behind(data, lent.get(), &give_back, copy.device());
  lent.release()->memory = copy.storage().set_data_ptr(std::move(behind));
}

}  // namespace

struct od_copy_stream {
  std::shared_ptr<Copies> copies;
};

struct od_copy_event {
  c10::Event event;
  std::shared_ptr<Copies> copies;
  uint64_t batch;
};

od_status od_copy_stream_new(int32_t device, od_copy_stream** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto cuda = overdrive::cuda_device(device);
    on_device(cuda, [&] {
      auto stream = c10::impl::VirtualGuardImpl(cuda.type()).getStreamFromGlobalPool(cuda);
      *out = new od_copy_stream{std::make_shared<Copies>(stream)};
    });
  });
}

void od_copy_stream_free(od_copy_stream* stream) noexcept { delete stream; }

od_status od_copy_stream_upload(const od_copy_stream* stream, const at::Tensor* host, at::Tensor** out,
                                od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    const auto& copies = stream->copies;
    c10::StreamGuard guard(copies->stream);
    auto copy = std::make_unique<at::Tensor>(
        host->to(copies->stream.device(), host->scalar_type(), /*non_blocking=*/true));
    if (!copy->is_same(*host)) lend(*copy, copies);
    *out = copy.release();
  });
}

od_status od_copy_stream_record(const od_copy_stream* stream, od_copy_event** out, od_error* err) noexcept {
  return overdrive::guarded(
      err, [&] { *out = new od_copy_event{stream->copies->record(), stream->copies, /*batch=*/0}; });
}

od_status od_copy_stream_end_batch(const od_copy_stream* stream, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { stream->copies->next_batch(); });
}

od_status od_copy_event_wait(od_copy_event* event, int32_t begins_batch, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto device = event->copies->stream.device();
    on_device(device, [&] { event->event.block(overdrive::current_stream(device)); });
    if (begins_batch != 0) event->batch = event->copies->next_batch();
  });
}

void od_copy_event_free(od_copy_event* event) noexcept {
  try {
    event->copies->keep(std::move(event->event));
  } catch (...) {
    // If there is no memory for the list, the event ends here.
  }
  delete event;
}

od_status od_copy_event_adopt(const od_copy_event* event, const at::Tensor* tensor, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    TORCH_CHECK(tensor->is_cuda(), "a tensor on a CUDA device is needed, this one is on ", tensor->device());
    auto user = overdrive::current_stream(tensor->device());
    auto* lent = tensor->has_storage() ? tensor->storage().data_ptr().cast_context<Lent>(&give_back) : nullptr;
    if (lent == nullptr) return tensor->record_stream(user);
    lent->batch = event->batch;
    if (!lent->user) {
      lent->user = user;
    } else if (*lent->user != user) {
      c10::impl::VirtualGuardImpl(user.device_type()).recordDataPtrOnStream(lent->memory, user);
    }
  });
}
