// Tensors whose memory comes and goes. Views of it, such as those that autograd saves, see the same.
#include "on_demand.h"

#include <utility>

#include <ATen/Functions.h>

#include "access.h"
#include "guarded.h"
#include "storage.h"

namespace {

void close(c10::StorageImpl& storage, const char* message) {
  overdrive::forbid_access(storage, message);
  // The memory is freed last, when nothing can reach it.
  auto freed = std::move(storage._mutable_data_ptr_no_checks());
  storage.set_data_ptr_noswap(at::DataPtr(nullptr, freed.device()));
}

void check(const at::Tensor& tensor) {
  TORCH_CHECK(overdrive::has_storage(tensor), "a tensor without strides has no memory of its own");
}

}  // namespace

od_status od_on_demand_new(const at::Tensor* tensor, int32_t scalar_type, size_t bytes, const char* message,
                           od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    check(*tensor);
    auto type = static_cast<at::ScalarType>(scalar_type);
    TORCH_CHECK(tensor->is_contiguous(), "its memory is not contiguous");
    TORCH_CHECK(bytes >= static_cast<size_t>(tensor->numel()) * c10::elementSize(type), "the memory is too small");
    auto storage = c10::make_intrusive<c10::StorageImpl>(c10::StorageImpl::use_byte_size_t(), bytes,
                                                         at::DataPtr(nullptr, tensor->device()), nullptr, false);
    close(*storage, message);
    auto closed = at::empty({0}, tensor->options().dtype(type).requires_grad(false));
    auto* impl = closed.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(c10::Storage(std::move(storage)));
    impl->set_sizes_contiguous(tensor->sizes());
    tensor->set_data(closed);
  });
}

od_status od_on_demand_fill(const at::Tensor* tensor, const at::Tensor* from, const char* message,
                            od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    check(*tensor);
    check(*from);
    auto &to = overdrive::storage_of(*tensor), &source = overdrive::storage_of(*from);
    TORCH_CHECK(overdrive::throws_on_access(to), "the tensor has memory already: was it replaced?");
    // Views of the memory rely on its size.
    TORCH_CHECK(!overdrive::throws_on_access(source) && source.nbytes() == to.nbytes() && from->device() == tensor->device(),
                "the memory that is moved has ", source.nbytes(), " bytes on ", from->device(), ", but should have ",
                to.nbytes(), " on ", tensor->device());
    // Throws for memory that is not the tensor's own.
    source.mutable_data();
    auto moved = std::move(source._mutable_data_ptr_no_checks());
    source.set_data_ptr_noswap(at::DataPtr(nullptr, from->device()));
    overdrive::forbid_access(source, message);
    overdrive::throws_on_access(to) = false;
    to.set_data_ptr_noswap(std::move(moved));
  });
}

od_status od_on_demand_free(const at::Tensor* tensor, const char* message, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    check(*tensor);
    close(overdrive::storage_of(*tensor), message);
  });
}
