// The C interface between libtorch and the Rust side of this crate.
//
// Every entry point is `noexcept`, returns an `od_status`, writes results through out-parameters only when it returns
// OD_OK, and describes a failure in `*err`, whose strings belong to the caller (free them with `od_error_clear`).
#pragma once

#include <cstddef>
#include <cstdint>

#include <ATen/core/List.h>
#include <ATen/core/Tensor.h>

extern "C" {

typedef int32_t od_status;
enum { OD_OK = 0, OD_OUT_OF_MEMORY = 1, OD_CUDA = 2, OD_DISTRIBUTED = 3, OD_OTHER = 4, OD_TIMEOUT = 5, OD_IO = 6 };

typedef struct {
  char* message;  // libtorch's message, without its C++ stack trace
  char* detail;   // the whole message, stack trace included
} od_error;

// One argument or result of an operator. `tag` says which of the other fields is set.
enum { OD_NONE = 0, OD_BOOL = 1, OD_INT = 2, OD_DOUBLE = 3, OD_TENSOR = 4, OD_TENSOR_LIST = 5, OD_INT_LIST = 6,
       OD_SCALAR_LIST = 7 };
typedef struct {
  int32_t tag;
  int64_t integer;      // OD_BOOL, OD_INT; the length of an OD_INT_LIST or OD_SCALAR_LIST
  double real;          // OD_DOUBLE
  const void* pointer;  // OD_TENSOR: at::Tensor*; OD_TENSOR_LIST: od_tensor_list*; OD_INT_LIST: int64_t*;
                        // OD_SCALAR_LIST: double*
} od_value;

typedef struct od_op od_op;
typedef struct od_tensor_list od_tensor_list;

typedef struct {
  int32_t device_type;
  int32_t enabled;
  int32_t scalar_type;
  int32_t cache_enabled;
} od_autocast_state;

typedef struct {
  int64_t allocated_bytes, allocated_peak_bytes, reserved_bytes, reserved_peak_bytes, alloc_retries;
} od_memory_stats;

// Pixels of a JPEG file: a region of the image scaled to `eighths` / 8 of its size.
typedef struct {
  uint32_t top, left, height, width;
  uint32_t eighths;   // 8, 4, 2 or 1
  uint32_t channels;  // 3: red, green, blue; 4: and a padding byte
} od_jpeg_part;

typedef struct {
  double lr, beta1, beta2, eps, weight_decay;
  double step;  // this one included
  int32_t maximize;
} od_adamw;

// The memory of a tensor, and how many tensors share it.
typedef struct {
  size_t owners;
  uint8_t* data;
  size_t bytes;
} od_storage;

// A node of the graph whose backward is Rust's.
typedef struct od_node od_node;

// A call of a function that is written in Rust. Undefined tensors stand for absent ones.
typedef struct {
  const char* name;
  int32_t materialize_grads;    // backward gets zeros for gradients that do not exist
  int32_t once_differentiable;  // the gradients cannot be differentiated
  const od_tensor_list* inputs;
  const od_tensor_list* outputs;
  const od_tensor_list* saved;
  const od_tensor_list* dirty;               // inputs that were changed in place
  const od_tensor_list* non_differentiable;  // outputs without a gradient
  void* owner;
  // Takes ownership of `grads`, and hands out the inputs' gradients. When it fails, it sets `err` by `od_error_set`;
  // `panic` is what Rust panicked with, if it did. Any thread may call it, several at once.
  od_status (*backward)(void* owner, const od_node* node, od_tensor_list* grads, od_tensor_list** out, void** panic,
                        od_error* err);
  void (*drop)(void* owner);
  void (*drop_panic)(void* panic);
} od_function;

typedef struct {
  int32_t retain_graph, create_graph, allow_unused;
  int32_t accumulate;  // into the leaves, as backward does
} od_grad_options;

// error.cpp
void od_error_clear(od_error* err) noexcept;
// Describes a failure of a callback; `err` is empty before.
void od_error_set(od_error* err, const char* message) noexcept;
od_status od_test_throw(int32_t what, od_error* err) noexcept;

// dispatch.cpp
od_status od_op_find(const char* name, const char* overload, const od_op** out, od_error* err) noexcept;
// `fused`: the operator is a fused optimizer, whose lists are checked against each other first.
od_status od_op_call(const od_op* op, int32_t fused, const od_value* args, size_t n_args, od_value* results,
                     size_t max_results, size_t* n_results, od_error* err) noexcept;

// tensor_list.cpp
od_status od_tensor_list_new(const at::Tensor* const* tensors, size_t n, od_tensor_list** out, od_error* err) noexcept;
od_status od_tensor_list_share(const od_tensor_list* list, od_tensor_list** out, od_error* err) noexcept;
void od_tensor_list_free(od_tensor_list* list) noexcept;
size_t od_tensor_list_len(const od_tensor_list* list) noexcept;
// Equal only for handles of the same tensor.
size_t od_tensor_id(const at::Tensor* tensor) noexcept;
// How often the tensors have been written to in place, in total.
od_status od_tensor_list_writes(const od_tensor_list* list, uint64_t* out, od_error* err) noexcept;
od_status od_tensor_list_get(const od_tensor_list* list, size_t index, at::Tensor** out, od_error* err) noexcept;
od_status od_tensor_list_grads(const od_tensor_list* list, int32_t like_params, uint8_t* defined, size_t* n_defined,
                               od_tensor_list** out, od_error* err) noexcept;
od_status od_tensor_list_sparse_grad(const od_tensor_list* list, size_t* index, od_error* err) noexcept;
od_status od_tensor_list_clear_grads(const od_tensor_list* list, od_error* err) noexcept;
// Sets the gradient of a tensor; a null one takes it away.
od_status od_tensor_set_grad(const at::Tensor* tensor, const at::Tensor* grad, od_error* err) noexcept;
// Takes a gradient away, to be overwritten; null if there is none.
od_status od_tensor_take_grad(const at::Tensor* tensor, at::Tensor** out, od_error* err) noexcept;
od_status od_tensor_list_select(const od_tensor_list* list, const uint8_t* keep, od_tensor_list** out,
                                od_error* err) noexcept;

// autocast.cpp
od_status od_autocast_get(int32_t device_type, od_autocast_state* out, od_error* err) noexcept;
od_status od_autocast_enter(const od_autocast_state* wanted, od_autocast_state* previous, od_error* err) noexcept;
od_status od_autocast_exit(const od_autocast_state* previous, od_error* err) noexcept;

// host_allocator.cpp
od_status od_host_cache_limit(size_t bytes, od_error* err) noexcept;
od_status od_host_cache_held(size_t* out, od_error* err) noexcept;
// The bytes that tensors on the host take now, and took at most since counting began; how often memory was asked for,
// and refused.
typedef struct od_host_memory {
  uint64_t allocated, peak, allocations, refused;
} od_host_memory;
// From now on tensors are counted, and more than `limit` bytes are an error of the kind OD_OUT_OF_MEMORY.
od_status od_host_memory_count(size_t limit, od_error* err) noexcept;
od_status od_host_memory_stats(od_host_memory* out, od_error* err) noexcept;
od_status od_host_memory_reset_peak(od_error* err) noexcept;
// Returns the free memory of malloc to the system.
void od_host_memory_trim(void) noexcept;
// Installs the allocator that puts large tensors into the folder of od_host_memory_in_folder.
od_status od_host_memory_install(od_error* err) noexcept;

// mapped_files.cpp
// From now on large tensors that this thread makes are in files in this folder, a descriptor that stays open; -1 for
// memory. Returns the folder before.
int32_t od_host_memory_in_folder(int32_t folder) noexcept;
// Asks the system to read what is mapped there.
void od_host_memory_read_ahead(const void* data, size_t bytes) noexcept;

// memory.cpp
od_status od_empty_pinned(const int64_t* shape, size_t n_dims, int32_t scalar_type, at::Tensor** out,
                          od_error* err) noexcept;
od_status od_host_buffer(int64_t bytes, int32_t pinned, at::Tensor** out, uint8_t** data, od_error* err) noexcept;
od_status od_storage_state(const at::Tensor* tensor, od_storage* out, od_error* err) noexcept;
// Rows of a contiguous tensor on the host, copied on the calling thread only.
od_status od_gather_rows(const at::Tensor* source, const int64_t* rows, size_t n_rows, int32_t pinned, at::Tensor** out,
                         od_error* err) noexcept;
// Takes ownership of `owner`: `drop` is called with it once, when the tensor's memory is freed or when this call fails.
od_status od_tensor_from_memory(void* data, const int64_t* shape, size_t n_dims, int32_t scalar_type, void* owner,
                                void (*drop)(void*), at::Tensor** out, od_error* err) noexcept;

// context.cpp
// Whether autograd records operators of this thread.
int32_t od_grad_enabled() noexcept;
// Makes operators of the calling thread run without libtorch's thread pool; `used` is 0 where that is not supported.
od_status od_use_one_thread(int32_t* used, od_error* err) noexcept;
od_status od_matmul_allow_tf32(int32_t* out, od_error* err) noexcept;
od_status od_set_matmul_allow_tf32(int32_t allow, od_error* err) noexcept;
od_status od_cudnn_allow_tf32(int32_t* out, od_error* err) noexcept;
od_status od_set_cudnn_allow_tf32(int32_t allow, od_error* err) noexcept;
// A device's default generator; a CPU's index is -1.
od_status od_rng_state(int32_t device_type, int32_t index, at::Tensor** out, od_error* err) noexcept;
// The CUDA devices that this process uses, a bit each.
od_status od_cuda_used(uint64_t* devices, od_error* err) noexcept;
od_status od_set_rng_state(int32_t device_type, int32_t index, const at::Tensor* state, od_error* err) noexcept;

// grad_hook.cpp Takes ownership of `owner`: `call` is called with it whenever the tensor's gradient has been
// accumulated, on the thread that does so; `drop` once, when the tensor is freed, another hook replaces this one, or
// this call fails. A hook can be replaced only if its `idle` returns that it is no longer needed.
od_status od_grad_hook_set(const at::Tensor* tensor, void* owner, void (*call)(void*), void (*drop)(void*),
                           int32_t (*idle)(void*), od_error* err) noexcept;

// function.cpp Takes ownership of `owner`: `drop` is called with it once, when the graph is freed, nothing is recorded,
// or this call fails. `out` are the outputs, with their place in the graph.
od_status od_function_record(const od_function* function, od_tensor_list** out, od_error* err) noexcept;
// These two are for `backward` alone.
od_status od_node_saved(const od_node* node, od_tensor_list** out, od_error* err) noexcept;
od_status od_node_needs_input_grad(const od_node* node, size_t index, int32_t* out, od_error* err) noexcept;
// The gradients of `inputs`, which is empty to accumulate into all leaves; `grad_outputs` is empty or as long as
// `outputs`. If a `backward` panicked, `panic` is what
// it panicked with, and belongs to the caller.
od_status od_grad(const od_tensor_list* outputs, const od_tensor_list* inputs, const od_tensor_list* grad_outputs,
                  const od_grad_options* options, od_tensor_list** out, void** panic, od_error* err) noexcept;

// adamw8bit.cpp The 256 numbers that the byte values represent, in rising order.
void od_dynamic_map(int32_t is_signed, float* codes) noexcept;
// Steps `param`, and both averages of its gradient, in blocks of 256 in the order of memory.
od_status od_adamw8bit(const at::Tensor* param, const at::Tensor* grad, const at::Tensor* codes1,
                       const at::Tensor* scales1, const at::Tensor* codes2, const at::Tensor* scales2,
                       const od_adamw* options, od_error* err) noexcept;

// cuda.cpp, or no_cuda.cpp where libtorch has no CUDA or its headers are missing
int32_t od_cuda_compiled(void) noexcept;
od_status od_cuda_device_name(int32_t device, char** out, od_error* err) noexcept;
// Writes 16 bytes.
od_status od_cuda_device_uuid(int32_t device, uint8_t* out, od_error* err) noexcept;
od_status od_cuda_device_capability(int32_t device, int32_t* major, int32_t* minor, od_error* err) noexcept;
void od_string_free(char* string) noexcept;
od_status od_cuda_memory_stats(int32_t device, od_memory_stats* out, od_error* err) noexcept;
od_status od_cuda_reset_peak_memory_stats(int32_t device, od_error* err) noexcept;
od_status od_cuda_empty_cache(od_error* err) noexcept;
od_status od_cuda_set_memory_fraction(int32_t device, double fraction, od_error* err) noexcept;
od_status od_cuda_record_memory_history(int32_t enabled, od_error* err) noexcept;
// A pickle that PyTorch's memory visualiser reads, as bytes.
od_status od_cuda_memory_snapshot(at::Tensor** out, od_error* err) noexcept;
od_status od_cuda_set_allocator_settings(const char* settings, od_error* err) noexcept;
od_status od_cuda_set_sync_debug_mode(int32_t mode, int32_t* previous, od_error* err) noexcept;

// A separate stream of one device for copies, and an event in it after a batch's copies.
typedef struct od_copy_stream od_copy_stream;
typedef struct od_copy_event od_copy_event;
od_status od_copy_stream_new(int32_t device, od_copy_stream** out, od_error* err) noexcept;
void od_copy_stream_free(od_copy_stream* stream) noexcept;
// Copies a host tensor to the stream's device; the host waits only if the tensor is not page-locked.
od_status od_copy_stream_upload(const od_copy_stream* stream, const at::Tensor* host, at::Tensor** out,
                                od_error* err) noexcept;
od_status od_copy_stream_record(const od_copy_stream* stream, od_copy_event** out, od_error* err) noexcept;
// Ends the last batch: the memory of those of its tensors that are gone goes back to the stream, as when the next batch
// begins.
od_status od_copy_stream_end_batch(const od_copy_stream* stream, od_error* err) noexcept;
// Makes the calling thread's current stream wait for the event; the host does not wait. Either a batch begins to be
// used with that, or the thread only prepares one.
od_status od_copy_event_wait(od_copy_event* event, int32_t begins_batch, od_error* err) noexcept;
void od_copy_event_free(od_copy_event* event) noexcept;
// After `wait`: the calling thread's current stream uses the tensor. Once the tensor is gone, the stream of copies
// waits for the work that this stream was given until then, and reuses the memory.
od_status od_copy_event_adopt(const od_copy_event* event, const at::Tensor* tensor, od_error* err) noexcept;

// timed_event.cpp A CUDA event with timing; `record` records it on the calling thread's current stream. No call here
// waits for the device.
typedef struct od_timed_event od_timed_event;
od_status od_timed_event_new(int32_t device, od_timed_event** out, od_error* err) noexcept;
void od_timed_event_free(od_timed_event* event) noexcept;
od_status od_timed_event_record(od_timed_event* event, od_error* err) noexcept;
od_status od_timed_event_is_reached(const od_timed_event* event, int32_t* out, od_error* err) noexcept;
// Fails for events that have not been reached.
od_status od_timed_event_elapsed(const od_timed_event* from, const od_timed_event* to, double* milliseconds,
                                 od_error* err) noexcept;

// jpeg.cpp, only with the feature libjpeg-turbo. When it fails, the contents of `pixels` are undefined.
od_status od_jpeg_decode(const uint8_t* file, size_t bytes, const od_jpeg_part* part, uint8_t* pixels,
                         od_error* err) noexcept;
}

// A plain owner, so that Rust can hold a list by a pointer.
struct od_tensor_list {
  c10::List<at::Tensor> list;
};
