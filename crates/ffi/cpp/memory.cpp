#include <atomic>
#include <cstring>

#include <ATen/Functions.h>
#include <ATen/ops/from_blob.h>

#include "arrivals.h"
#include "guarded.h"
#include "huge_pages.h"

od_status od_empty_pinned(const int64_t* shape, size_t n_dims, int32_t scalar_type, at::Tensor** out,
                          od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(scalar_type)).pinned_memory(true);
    *out = new at::Tensor(at::empty(at::IntArrayRef(shape, n_dims), options));
  });
}

od_status od_host_buffer(int64_t bytes, int32_t pinned, at::Tensor** out, uint8_t** data, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto tensor = at::empty({bytes}, at::TensorOptions().dtype(at::kByte).pinned_memory(pinned != 0));
    *data = tensor.data_ptr<uint8_t>();
    if (pinned == 0) {
      overdrive::advise_huge_pages(*data, static_cast<size_t>(bytes));
    }
    *out = new at::Tensor(std::move(tensor));
  });
}

od_status od_storage_state(const at::Tensor* tensor, od_storage* out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    overdrive::arrive(*tensor);
    const auto& storage = tensor->storage();
    out->owners = storage.use_count();
    // Makes writes of other owners, which are gone now, visible to the caller, which may be the only owner left.
    std::atomic_thread_fence(std::memory_order_acquire);
    out->data = static_cast<uint8_t*>(storage.mutable_data());
    out->bytes = storage.nbytes();
  });
}

od_status od_gather_rows(const at::Tensor* source, const int64_t* rows, size_t n_rows, int32_t pinned, at::Tensor** out,
                         od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    TORCH_CHECK(source->device().is_cpu() && source->is_contiguous() && source->dim() > 0,
                "a contiguous tensor on the host with at least one dimension is needed");
    // Another owner of the shared memory may have shrunk it.
    auto end = static_cast<size_t>(source->storage_offset()) * source->itemsize() + source->nbytes();
    TORCH_CHECK(source->layout() == at::kStrided && end <= source->storage().nbytes(),
                "the tensor's memory is smaller than its shape says: was it resized?");
    auto shape = source->sizes().vec();
    int64_t len = shape[0];
    shape[0] = static_cast<int64_t>(n_rows);
    auto gathered = at::empty(shape, source->options().pinned_memory(pinned != 0));
    size_t bytes = len == 0 ? 0 : source->nbytes() / static_cast<size_t>(len);
    const auto* from = static_cast<const char*>(source->const_data_ptr());
    auto* to = static_cast<char*>(gathered.mutable_data_ptr());
    for (size_t i = 0; i < n_rows; ++i) {
      TORCH_CHECK_INDEX(rows[i] >= 0 && rows[i] < len, "row ", rows[i], " is out of range for ", len, " rows");
    }
    // On one thread: for a batch's rows, waking another thread costs more than it saves.
    for (size_t i = 0; i < n_rows; ++i) {
      std::memcpy(to + i * bytes, from + static_cast<size_t>(rows[i]) * bytes, bytes);
    }
    *out = new at::Tensor(std::move(gathered));
  });
}

od_status od_tensor_from_memory(void* data, const int64_t* shape, size_t n_dims, int32_t scalar_type, void* owner,
                                void (*drop)(void*), at::Tensor** out, od_error* err) noexcept {
  // `maker` owns `owner` from here on, and drops it if no tensor is made.
  auto maker = at::for_blob(data, at::IntArrayRef(shape, n_dims));
  maker.context(owner, drop);
  return overdrive::guarded(err, [&] {
    auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(scalar_type));
    *out = new at::Tensor(maker.options(options).make_tensor());
  });
}
