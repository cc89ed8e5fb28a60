// Steps written down as lists of operators, and compiled packages that run them.
#pragma once

#include "overdrive.h"

extern "C" {

typedef struct od_recorder od_recorder;
typedef struct od_package od_package;

// record.cpp. The calling thread records until od_record_stop, which has to be called on the same thread; one thread of a
// process at a time. `on_operator` is called with `owner` before each operator, and `on_refusal` with a reason after that
// for one that cannot be compiled, while the operator's caller is on the stack. `owner` is dropped with the recorder, or
// when there is none. `*out` is null if another thread is recording.
od_status od_record_start(void* owner, void (*on_operator)(void*), void (*on_refusal)(void*, const char*),
                          void (*drop)(void*), od_recorder** out, od_error* err) noexcept;
void od_record_stop(od_recorder* recorder) noexcept;
void od_record_free(od_recorder* recorder) noexcept;
// The number of a tensor in the record. A new one counts as one from outside.
od_status od_record_number(od_recorder* recorder, const at::Tensor* tensor, int64_t* out, od_error* err) noexcept;
// Gives a tensor from outside a number of its own, also if another one has the same memory.
od_status od_record_add_input(od_recorder* recorder, const at::Tensor* tensor, od_error* err) noexcept;
// Whether the step has written to the memory of a tensor, and whether autograd has noticed: bits of `*out`.
enum { OD_WRITTEN = 1, OD_NOTICED = 2 };
od_status od_record_writes_to(od_recorder* recorder, const at::Tensor* tensor, int32_t* out, od_error* err) noexcept;
// The tensors that come from outside, in the order of their numbers.
od_status od_record_externals(od_recorder* recorder, od_tensor_list** out, od_error* err) noexcept;
// The operators, as the items of a JSON list.
od_status od_record_operators(od_recorder* recorder, char** out, od_error* err) noexcept;

// package.cpp. Loading runs the package's code: the caller vouches for it.
od_status od_package_load(const char* path, int32_t device_index, od_package** out, od_error* err) noexcept;
od_status od_package_run(od_package* package, const od_tensor_list* inputs, od_tensor_list** out,
                         od_error* err) noexcept;
// The least size of a batch that a package for several sizes is for; 0 for others.
od_status od_package_least_size(od_package* package, int64_t* out, od_error* err) noexcept;
void od_package_free(od_package* package) noexcept;
// Whether a tensor's values lie in memory at its strides.
enum { OD_IN_MEMORY = 0, OD_UNDEFINED = 1, OD_WITHOUT_STRIDES = 2, OD_LAZY = 3 };
int32_t od_tensor_values(const at::Tensor* tensor) noexcept;
// Whether two tensors are parts of one memory; those without memory share none.
int32_t od_tensors_share_memory(const at::Tensor* one, const at::Tensor* other) noexcept;
// Where the memory begins that a tensor is a part of; null if it has none.
const void* od_tensor_memory(const at::Tensor* tensor) noexcept;
// Counts a change in place, as operators do.
void od_tensor_bump_version(const at::Tensor* tensor) noexcept;
}

namespace overdrive {

// How often the process has set the state of a generator (context.cpp).
uint64_t generator_sets() noexcept;

}  // namespace overdrive
