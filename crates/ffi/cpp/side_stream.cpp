// Copies between a GPU and host memory beside the computation. Uses c10's device interface, which needs no CUDA header
// or library.
#include "side_stream.h"

#include <memory>

#include <ATen/core/grad_mode.h>
#include <c10/core/StreamGuard.h>

#include "cuda_device.h"
#include "guarded.h"
#include "transfer.h"

od_status od_side_stream_new(int32_t device, od_side_stream** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto cuda = overdrive::cuda_device(device);
    overdrive::on_device(cuda, [&] {
      auto stream = c10::impl::VirtualGuardImpl(cuda.type()).getStreamFromGlobalPool(cuda);
      *out = new od_side_stream{std::make_shared<overdrive::Side>(stream)};
    });
  });
}

void od_side_stream_free(od_side_stream* side) noexcept { delete side; }

od_status od_side_stream_synchronize(const od_side_stream* side, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { side->side->stream.synchronize(); });
}

od_status od_side_stream_copy(const od_side_stream* side, const at::Tensor* from, const at::Tensor* to, od_transfer** out,
                              od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    const auto& stream = side->side->stream;
    const auto &there = from->is_cuda() ? *from : *to, &here = from->is_cuda() ? *to : *from;
    TORCH_CHECK(there.device() == stream.device() && here.is_cpu(), "a copy between ", stream.device(),
                " and the host is asked for, from ", from->device(), " to ", to->device());
    TORCH_CHECK(from->sizes() == to->sizes() && from->scalar_type() == to->scalar_type(), "a copy from ",
                from->scalar_type(), " ", from->sizes(), " to ", to->scalar_type(), " ", to->sizes(),
                " should be of one type and shape");
    TORCH_CHECK(!to->is_conj() && !to->is_neg(), "a copy to a conjugated or negated view is asked for");
    overdrive::on_device(stream.device(), [&] {
      auto user = overdrive::current_stream(stream.device());
      at::NoGradGuard no_grad;
      // A lazily conjugated or negated view would have to be resolved on the host, before the copy has ended.
      auto source = from->resolve_conj().resolve_neg();
      auto transfer = std::make_unique<od_transfer>(side->side, from->is_cuda() ? source : *to, user);
      transfer->copied.record(user);
      transfer->copied.block(stream);
      c10::StreamGuard guard(stream);
      to->copy_(source, /*non_blocking=*/true);
      transfer->copied.record(stream);
      *out = transfer.release();
    });
  });
}

od_status od_transfer_tensor(od_transfer* transfer, at::Tensor** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto user = transfer->block_current();
    if (user != transfer->user) transfer->tensor.record_stream(user);
    *out = new at::Tensor(transfer->tensor);
  });
}

void od_transfer_free(od_transfer* transfer) noexcept { delete transfer; }
