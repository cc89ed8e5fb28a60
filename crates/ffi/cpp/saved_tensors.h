// Hooks of the tensors that autograd saves for backward passes.
#pragma once

#include "overdrive.h"

extern "C" {

// What to do with a tensor that is saved. `pack` may leave `packed` null: the tensor is kept as it is. What a callback
// panicked with goes to `panic`, and its message to the error.
typedef struct od_saved_hooks {
  void* owner;
  od_status (*pack)(void* owner, const at::Tensor* tensor, void** packed, void** panic, od_error* err);
  od_status (*unpack)(void* packed, at::Tensor** out, void** panic, od_error* err);
  void (*drop)(void* owner);
  void (*drop_packed)(void* packed);
  void (*drop_panic)(void* panic);
} od_saved_hooks;

// saved_tensors.cpp. Takes ownership of `owner`, which is dropped when the last tensor that it packed is, too. From now
// on the calling thread's saved tensors go through these hooks, until od_saved_hooks_pop with the number that this
// returns. Only the hooks that were pushed last are asked.
od_status od_saved_hooks_push(const od_saved_hooks* hooks, uint64_t* number, od_error* err) noexcept;
void od_saved_hooks_pop(uint64_t number) noexcept;

// Saves a tensor as an operator saves its inputs, through the current hooks.
typedef struct od_saved_tensor od_saved_tensor;
od_status od_saved_tensor_new(const at::Tensor* tensor, od_saved_tensor** out, od_error* err) noexcept;
od_status od_saved_tensor_unpack(const od_saved_tensor* saved, at::Tensor** out, void** panic, od_error* err) noexcept;
void od_saved_tensor_free(od_saved_tensor* saved) noexcept;

// The number of the backward pass that runs on this thread; -1 outside of one.
int64_t od_backward_pass(void) noexcept;
// Drops `owner` when the pass is over or has failed; at once if there is no pass.
od_status od_keep_for_pass(void* owner, void (*drop)(void*), od_error* err) noexcept;
// Another tensor with the same memory and version, without a history.
od_status od_tensor_data(const at::Tensor* tensor, at::Tensor** out, od_error* err) noexcept;
// Whether it is a leaf that requires a gradient, or a view of one.
int32_t od_tensor_is_parameter(const at::Tensor* tensor) noexcept;
// In a pack hook: whether ReLU is saving this tensor, its result, for its own gradient.
int32_t od_tensor_is_relu_saving(const at::Tensor* tensor) noexcept;
// The identity of a tensor: its memory, if that is still alive, its part of the memory, and its version.
typedef struct od_same_tensor od_same_tensor;
od_status od_same_tensor_new(const at::Tensor* tensor, od_same_tensor** out, od_error* err) noexcept;
int32_t od_same_tensor_is(const od_same_tensor* same, const at::Tensor* tensor) noexcept;
void od_same_tensor_free(od_same_tensor* same) noexcept;
// From now on the tensor has a version of its own, which begins at this number.
od_status od_tensor_set_version(const at::Tensor* tensor, int64_t version, od_error* err) noexcept;
// How often the tensor was changed in place.
int64_t od_tensor_version(const at::Tensor* tensor) noexcept;
}
