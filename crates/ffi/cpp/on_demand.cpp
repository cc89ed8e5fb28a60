// Tensors whose memory comes and goes. Views of it, such as those that autograd saves, see the same.
#include "on_demand.h"

#include <string>
#include <utility>

#include <ATen/Functions.h>

#include "guarded.h"
#include "storage.h"

namespace {

// libtorch lets a storage throw on any access, with a message, but has no function that ends this. C++ allows the name
// of a private member in an explicit instantiation, which hands it to a friend.
bool& throws_on_access(c10::StorageImpl& storage);

template <bool c10::StorageImpl::* Flag>
struct Opens {
  friend bool& throws_on_access(c10::StorageImpl& storage) { return storage.*Flag; }
};
template struct Opens<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

void close(c10::StorageImpl& storage, const char* message) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
  // The memory is freed last, when nothing can reach it.
  auto freed = std::move(storage._mutable_data_ptr_no_checks());
  storage.set_data_ptr_noswap(at::DataPtr(nullptr, freed.device()));
}

bool is_closed(c10::StorageImpl& storage) { return throws_on_access(storage); }

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
    TORCH_CHECK(is_closed(to), "the tensor has memory already: was it replaced?");
    // Views of the memory rely on its size.
    TORCH_CHECK(!is_closed(source) && source.nbytes() == to.nbytes() && from->device() == tensor->device(),
                "the memory that is moved has ", source.nbytes(), " bytes on ", from->device(), ", but should have ",
                to.nbytes(), " on ", tensor->device());
    // Throws for memory that is not the tensor's own.
    source.mutable_data();
    auto moved = std::move(source._mutable_data_ptr_no_checks());
    source.set_data_ptr_noswap(at::DataPtr(nullptr, from->device()));
    source.release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
    throws_on_access(to) = false;
    to.set_data_ptr_noswap(std::move(moved));
  });
}

od_status od_on_demand_free(const at::Tensor* tensor, const char* message, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    check(*tensor);
    close(overdrive::storage_of(*tensor), message);
  });
}
