// Records steps as lists of operators, and runs the packages that they are compiled to.
#pragma once

#include "overdrive.h"

extern "C" {

typedef struct od_recorder od_recorder;
typedef struct od_package od_package;

// record.cpp. The calling thread records until od_record_stop, which has to be called on the same thread. Only one
// thread of a process can record at a time: `*out` is null if another one does. `on_operator` is called with `owner`
// before each operator. If the operator cannot be compiled, `on_refusal` is called after that with the reason. In both,
// the operator's caller is on the stack. `owner` is dropped with the recorder, or before the return if there is none.
od_status od_record_start(void* owner, void (*on_operator)(void*), void (*on_refusal)(void*, const char*),
                          void (*drop)(void*), od_recorder** out, od_error* err) noexcept;
void od_record_stop(od_recorder* recorder) noexcept;
void od_record_free(od_recorder* recorder) noexcept;
// The number of a tensor in the record. A new one becomes external: an input, which no recorded operator has made.
od_status od_record_number(od_recorder* recorder, const at::Tensor* tensor, int64_t* out, od_error* err) noexcept;
// Makes a tensor an external one with a number of its own, even if another one has the same memory.
od_status od_record_add_input(od_recorder* recorder, const at::Tensor* tensor, od_error* err) noexcept;
// Bits of `*out`: whether the step has written to the memory of a tensor, and whether that has incremented its version,
// by which autograd notices.
enum { OD_WRITTEN = 1, OD_NOTICED = 2 };
od_status od_record_writes_to(od_recorder* recorder, const at::Tensor* tensor, int32_t* out, od_error* err) noexcept;
// The external tensors, in the order of their numbers.
od_status od_record_externals(od_recorder* recorder, od_tensor_list** out, od_error* err) noexcept;
// The operators, as the items of a JSON list. Calls `on_refusal` if the step as a whole cannot be compiled.
od_status od_record_operators(od_recorder* recorder, char** out, od_error* err) noexcept;

// package.cpp. Loading runs the package's code, so the caller has to trust the file.
od_status od_package_load(const char* path, int32_t device_index, od_package** out, od_error* err) noexcept;
od_status od_package_run(od_package* package, const od_tensor_list* inputs, od_tensor_list** out,
                         od_error* err) noexcept;
// The least size of a batch that a package for several sizes accepts; 0 for a package for one size.
od_status od_package_least_size(od_package* package, int64_t* out, od_error* err) noexcept;
void od_package_free(od_package* package) noexcept;
// Whether a tensor's values lie in memory at its strides.
enum { OD_IN_MEMORY = 0, OD_UNDEFINED = 1, OD_WITHOUT_STRIDES = 2, OD_LAZY = 3 };
int32_t od_tensor_values(const at::Tensor* tensor) noexcept;
// Whether two tensors are parts of one allocation; a tensor without memory shares none.
int32_t od_tensors_share_memory(const at::Tensor* one, const at::Tensor* other) noexcept;
// The begin of the allocation that a tensor is a part of; null if it has none.
const void* od_tensor_memory(const at::Tensor* tensor) noexcept;
// The address of its first element, without an access.
const void* od_tensor_address(const at::Tensor* tensor) noexcept;
// Increments the tensor's version, as operators do that write in place.
void od_tensor_bump_version(const at::Tensor* tensor) noexcept;
}

namespace overdrive {

// How often the process has set the state of a generator (context.cpp).
uint64_t generator_sets() noexcept;

}  // namespace overdrive
