// Lists of tensors that stay on the C++ side, so that a step over hundreds of parameters needs only one FFI call.
#include <memory>

#include <ATen/Functions.h>

#include "guarded.h"
#include "storage.h"

namespace {

std::unique_ptr<od_tensor_list> new_list(size_t capacity) {
  auto list = std::make_unique<od_tensor_list>();
  list->list.reserve(capacity);
  return list;
}

}  // namespace

od_status od_tensor_list_new(const at::Tensor* const* tensors, size_t n, od_tensor_list** out,
                             od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto list = new_list(n);
    for (size_t i = 0; i < n; ++i) list->list.push_back(*tensors[i]);
    *out = list.release();
  });
}

// c10::List is a counted reference, so this copies no tensor handles.
od_status od_tensor_list_share(const od_tensor_list* list, od_tensor_list** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { *out = new od_tensor_list{list->list}; });
}

void od_tensor_list_free(od_tensor_list* list) noexcept { delete list; }

size_t od_tensor_list_len(const od_tensor_list* list) noexcept { return list->list.size(); }

size_t od_tensor_id(const at::Tensor* tensor) noexcept {
  return reinterpret_cast<size_t>(tensor->unsafeGetTensorImpl());
}

od_status od_tensor_list_writes(const od_tensor_list* list, uint64_t* out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    uint64_t writes = 0;
    for (const at::Tensor& tensor : list->list)
      if (tensor.defined() && !tensor.is_inference()) writes += static_cast<uint64_t>(tensor._version());
    *out = writes;
  });
}

od_status od_tensor_list_get(const od_tensor_list* list, size_t index, at::Tensor** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { *out = new at::Tensor(list->list.get(index)); });
}

// The gradients that exist, in the order of the list; `defined` says which tensors have one. With `like_params`, a
// gradient whose strides differ from its tensor's is copied to the tensor's strides: the fused kernels access both by
// one index.
od_status od_tensor_list_grads(const od_tensor_list* list, int32_t like_params, uint8_t* defined, size_t* n_defined,
                               od_tensor_list** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto grads = new_list(list->list.size());
    for (size_t i = 0; i < list->list.size(); ++i) {
      at::Tensor tensor = list->list.get(i);
      const at::Tensor& grad = tensor.grad();
      defined[i] = grad.defined();
      if (!grad.defined()) continue;
      if (like_params != 0) {
        TORCH_CHECK(grad.layout() == at::kStrided, "parameter ", i, " has a ", grad.layout(),
                    " gradient, but the fused optimizers take dense ones");
        if (grad.strides() != tensor.strides()) {
          grads->list.push_back(at::empty_strided(tensor.sizes(), tensor.strides(), grad.options()).copy_(grad));
          continue;
        }
      }
      grads->list.push_back(grad);
    }
    *n_defined = grads->list.size();
    *out = grads.release();
  });
}

// The index of the first tensor whose gradient is not dense; the list's length when there is none.
od_status od_tensor_list_sparse_grad(const od_tensor_list* list, size_t* index, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    for (*index = 0; *index < list->list.size(); ++*index) {
      at::Tensor tensor = list->list.get(*index);
      const at::Tensor& grad = tensor.grad();
      if (grad.defined() && grad.layout() != at::kStrided) return;
    }
  });
}

od_status od_tensor_set_grad(const at::Tensor* tensor, const at::Tensor* grad, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    if (grad == nullptr) return tensor->mutable_grad().reset();
    TORCH_CHECK(grad->sizes() == tensor->sizes() && grad->scalar_type() == tensor->scalar_type() &&
                    grad->device() == tensor->device(),
                "the gradient of a tensor of ", tensor->toString(), " ", tensor->sizes(), " cannot be one of ",
                grad->toString(), " ", grad->sizes());
    tensor->mutable_grad() = *grad;
  });
}

od_status od_tensor_take_grad(const at::Tensor* tensor, at::Tensor** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    const at::Tensor grad = tensor->grad();
    *out = nullptr;
    if (!grad.defined()) return;
    // The tensor has it, and this function. Its memory may be that of a gradient which other nodes of the graph still need.
    bool is_held = grad.use_count() > 2;
    if (overdrive::has_storage(grad)) {
      // Nor is it a part of a larger memory, which would be there as long as the part.
      is_held |= grad.storage().use_count() > 1 || grad.storage().nbytes() > static_cast<size_t>(grad.nbytes());
      is_held |= !grad.is_contiguous();
    }
    auto taken = std::make_unique<at::Tensor>(
        !is_held ? grad : overdrive::has_storage(grad) ? grad.clone(at::MemoryFormat::Contiguous) : grad.clone());
    tensor->mutable_grad().reset();
    *out = taken.release();
  });
}

od_status od_tensor_list_clear_grads(const od_tensor_list* list, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    for (size_t i = 0; i < list->list.size(); ++i) list->list.get(i).mutable_grad().reset();
  });
}

od_status od_tensor_list_select(const od_tensor_list* list, const uint8_t* keep, od_tensor_list** out,
                                od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto kept = new_list(list->list.size());
    for (size_t i = 0; i < list->list.size(); ++i)
      if (keep[i]) kept->list.push_back(list->list.get(i));
    *out = kept.release();
  });
}
