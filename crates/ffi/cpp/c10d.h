// The C interface to libtorch's c10d: stores, process groups, collectives and DDP's reducer. Only with the feature
// `distributed`. The rules of overdrive.h apply.
#pragma once

#include "overdrive.h"

extern "C" {

typedef struct od_store od_store;
typedef struct od_group od_group;
typedef struct od_work od_work;
typedef struct od_mem_pool od_mem_pool;
typedef struct od_reducer od_reducer;

typedef struct {
  const char* host;
  uint16_t port;
  int32_t is_server;
  int32_t socket;        // the listening socket, owned from here on; -1: share this process's server at the port
  int64_t world_size;    // 0: wait for no clients
  int32_t wait_workers;  // a server waits until `world_size` clients have connected
  int64_t connect_ms;    // also for the clients to come
  int64_t timeout_ms;    // for each answer
} od_tcp_store;

enum { OD_GLOO = 1, OD_NCCL = 2, OD_GLOO_AND_NCCL = 3 };
typedef struct {
  int32_t backend;
  int32_t rank;
  int32_t size;
  const char* name;
  const uint64_t* global_ranks;  // `size` of them
  int32_t verify;                // each collective is compared over ranks before it runs
  int32_t cuda_device;           // NCCL's device; -1: the first that is used
  int32_t one_host;              // all members are on this host: Gloo listens at the loopback
  int64_t timeout_ms;
  int32_t high_priority;         // NCCL's streams are of high priority
  const od_group* split_from;    // null, or the group over NCCL whose communicator is split
  int32_t color;                 // of a split: the same for the members
} od_group_options;

enum { OD_ALL_REDUCE = 0, OD_ALL_REDUCE_COALESCED = 1, OD_REDUCE = 2, OD_BROADCAST = 3, OD_ALL_GATHER = 4,
       OD_ALL_GATHER_INTO = 5, OD_REDUCE_SCATTER = 6, OD_REDUCE_SCATTER_INTO = 7, OD_GATHER = 8, OD_SCATTER = 9,
       OD_ALL_TO_ALL = 10, OD_ALL_TO_ALL_SINGLE = 11, OD_SEND = 12, OD_RECV = 13, OD_RECV_ANY = 14, OD_BARRIER = 15 };
typedef struct {
  int32_t kind;
  int32_t reduce_op;  // c10d::ReduceOp's numbers
  double factor;      // of a premultiplied sum
  int32_t peer;       // the root, or the other rank of a send or receive
  int32_t tag;
  int64_t timeout_ms;                // 0: the group's
  const od_tensor_list* inputs;      // null for none
  const od_tensor_list* outputs;     // null for none
  const int64_t* input_splits;       // of OD_ALL_TO_ALL_SINGLE: one size per rank
  const int64_t* output_splits;
} od_collective;

typedef struct {
  size_t index;
  int32_t is_last;
  at::Tensor* buffer;          // the bucket's gradients, flat; owned by the callee
  od_tensor_list* gradients;   // views of it, one per parameter; owned by the callee
  od_tensor_list* parameters;  // owned by the callee
  od_tensor_list* earlier;     // gradients of earlier passes, or none; owned by the callee
} od_bucket;

typedef struct {
  int64_t bucket_bytes;
  int64_t first_bucket_bytes;
  int32_t default_buckets;  // the sizes are PyTorch's defaults, with a small first bucket
  const int64_t* bucket_list;  // sizes of the first buckets, in the order in which gradients become ready; the last repeats
  size_t bucket_list_length;   // 0: `bucket_bytes` for all
  int32_t skip_unused;         // unused parameters, the same on all ranks, are not reduced
  int32_t find_unused_parameters;
  int32_t gradient_as_bucket_view;
  int32_t static_graph;
  int32_t broadcast_buffers;     // only for the log
  int32_t low_dtype;             // of passes; -1: the parameters'
  const od_tensor_list* frozen;  // parameters without gradients, which passes use in that dtype too, or null
} od_reducer_options;

// c10d_store.cpp
od_status od_tcp_store_new(const od_tcp_store* options, od_store** out, od_error* err) noexcept;
od_status od_file_store_new(const char* path, int32_t world_size, int64_t timeout_ms, od_store** out,
                            od_error* err) noexcept;
od_status od_hash_store_new(od_store** out, od_error* err) noexcept;
od_status od_prefix_store_new(const char* prefix, const od_store* inner, od_store** out, od_error* err) noexcept;
void od_store_free(od_store* store) noexcept;
od_status od_store_set(const od_store* store, const char* key, const uint8_t* value, size_t bytes,
                       od_error* err) noexcept;
// Waits for the key. `visit` is called once with its value.
od_status od_store_get(const od_store* store, const char* key, int64_t timeout_ms, void* visitor,
                       void (*visit)(void*, const uint8_t*, size_t), od_error* err) noexcept;
od_status od_store_compare_set(const od_store* store, const char* key, const uint8_t* expected, size_t expected_bytes,
                               const uint8_t* value, size_t bytes, void* visitor,
                               void (*visit)(void*, const uint8_t*, size_t), od_error* err) noexcept;
od_status od_store_add(const od_store* store, const char* key, int64_t amount, int64_t* out, od_error* err) noexcept;
od_status od_store_check(const od_store* store, const char* const* keys, size_t n, int32_t* out,
                         od_error* err) noexcept;
od_status od_store_wait(const od_store* store, const char* const* keys, size_t n, int64_t timeout_ms,
                        od_error* err) noexcept;
od_status od_store_delete(const od_store* store, const char* key, int32_t* deleted, od_error* err) noexcept;

// c10d_group.cpp
int32_t od_nccl_compiled(void) noexcept;
od_status od_group_new(const od_store* store, const od_group_options* options, od_group** out, od_error* err) noexcept;
// Over NCCL: closes the group within `timeout_ms`, and aborts it where that fails, after a failed collective, and for 0.
// Does not wait for Gloo: a group with work under way is destroyed when that has failed or is done.
void od_group_free(od_group* group, int64_t timeout_ms) noexcept;
// Takes part in a split of the group's communicator as a rank that is a member of no part.
od_status od_group_split_none(const od_group* group, int32_t device, od_error* err) noexcept;
// Waits for work under way, then frees the communicators. Aborts what is not done by then.
od_status od_group_close(const od_group* group, int64_t timeout_ms, od_error* err) noexcept;
od_status od_group_monitored_barrier(const od_group* group, int64_t timeout_ms, int32_t wait_all_ranks,
                                     od_error* err) noexcept;
od_status od_group_broadcast_coalesced(const od_group* group, const od_tensor_list* tensors, int64_t bytes,
                                       int32_t root, od_error* err) noexcept;
od_status od_group_verify_params(const od_group* group, const od_tensor_list* params, od_error* err) noexcept;
// Sets how long each collective from here on may take.
od_status od_group_set_timeout(const od_group* group, int64_t timeout_ms, od_error* err) noexcept;
// What NCCL's watchdog has found, as c10d::ErrorType's number; 0 for nothing, and over Gloo.
od_status od_group_failure(const od_group* group, int32_t* out, od_error* err) noexcept;
// The last collectives of all of the process's groups over NCCL (`nccl` 1) or Gloo, as JSON; the caller frees it.
od_status od_flight_record(int32_t nccl, int32_t only_active, char** out, od_error* err) noexcept;
od_status od_group_abort(const od_group* group, od_error* err) noexcept;
// The sum over ranks of a copy of the tensor; its backward sums the gradients over ranks.
od_status od_group_sum_with_grad(const od_group* group, const at::Tensor* tensor, at::Tensor** out,
                                 od_error* err) noexcept;

// c10d_mem_pool.cpp
// A pool of a CUDA device's memory. With `nccl`, a group, NCCL allocates it.
od_status od_mem_pool_new(int32_t device, const od_group* nccl, od_mem_pool** out, od_error* err) noexcept;
void od_mem_pool_free(od_mem_pool* pool) noexcept;
// Until the end, this thread's allocations on the device come from the pool.
od_status od_mem_pool_begin(const od_mem_pool* pool, od_error* err) noexcept;
void od_mem_pool_end(const od_mem_pool* pool) noexcept;
// Registers the pool's memory, what it has and what comes, at the group's communicator. The group keeps the pool.
od_status od_group_register_pool(const od_group* group, const od_mem_pool* pool, od_error* err) noexcept;
od_status od_group_deregister_pool(const od_group* group, const od_mem_pool* pool, od_error* err) noexcept;

// c10d_collective.cpp
od_status od_collective_start(const od_group* group, const od_collective* collective, od_work** out,
                              od_error* err) noexcept;
// Sends (`receives` 0) and receives between this rank and others, all at once, over NCCL; one tensor each.
od_status od_batch_start(const od_group* group, const od_tensor_list* tensors, const int32_t* peers,
                         const int32_t* receives, od_work** out, od_error* err) noexcept;
void od_work_free(od_work* work) noexcept;
int32_t od_work_is_completed(const od_work* work) noexcept;
// `timeout_ms` 0: the collective's own timeout.
od_status od_work_wait(const od_work* work, int64_t timeout_ms, od_error* err) noexcept;
// Does not abort NCCL's work that is not done by then.
od_status od_work_wait_for(const od_work* work, int64_t timeout_ms, od_error* err) noexcept;
od_status od_work_source_rank(const od_work* work, int32_t* out, od_error* err) noexcept;
// Backward from a loss, with a reducer's collectives; failures between ranks get their own status.
od_status od_reducer_backward(const at::Tensor* loss, od_error* err) noexcept;

// c10d_reducer.cpp
// `sparse`: for each parameter, 1 if its gradients are.
od_status od_reducer_new(const od_group* group, const od_tensor_list* params, const char* const* names,
                         const uint8_t* sparse, const od_reducer_options* options, od_reducer** out,
                         od_error* err) noexcept;
void od_reducer_free(od_reducer* reducer) noexcept;
od_status od_reducer_before_forward(const od_reducer* reducer, int32_t synchronised, int32_t* rebuilt,
                                    od_error* err) noexcept;
// Begins a pass in the dtype of `low_dtype`, which ends when backward does, or by `od_reducer_raise`. `out`: 0 where one
// has begun already, or there is no such dtype.
od_status od_reducer_lower(const od_reducer* reducer, int32_t* out, od_error* err) noexcept;
od_status od_reducer_raise(const od_reducer* reducer, od_error* err) noexcept;
// The next backward passes reduce the gradients (arm), or leave them local (disarm).
od_status od_reducer_arm(const od_reducer* reducer, const od_tensor_list* outputs, od_error* err) noexcept;
od_status od_reducer_disarm(const od_reducer* reducer, od_error* err) noexcept;
// Averages the accumulated gradients without a backward pass.
od_status od_reducer_close_with_nothing(const od_reducer* reducer, od_error* err) noexcept;
// Whether a backward pass is under way on this thread, or a communication hook on any.
int32_t od_reducer_within_backward(const od_reducer* reducer) noexcept;
// The same outputs, passed through a node of the graph that notices when backward begins.
od_status od_reducer_sink(const od_reducer* reducer, const od_tensor_list* outputs, od_tensor_list** out,
                          od_error* err) noexcept;
od_status od_reducer_fp16_hook(const od_reducer* reducer, od_error* err) noexcept;
// Takes ownership of `owner`: `drop` is called with it once, when the reducer is destroyed or this call fails. `start`
// returns 0 when it has begun a bucket's communication; `finish` returns the result, which we own, or null if it
// failed.
od_status od_reducer_set_hook(od_reducer* reducer, void* owner, int32_t (*start)(void*, const od_bucket*),
                              at::Tensor* (*finish)(void*, size_t), void (*drop)(void*), od_error* err) noexcept;
// The numbers of each bucket's parameters, one bucket after the other, and the buckets' lengths: each as many as there
// are parameters at most. `is_final`: they are not rebuilt after the first pass.
od_status od_reducer_layout(const od_reducer* reducer, size_t* numbers, size_t* lengths, size_t* count,
                            int32_t* is_final, od_error* err) noexcept;
od_status od_reducer_lay_out(const od_reducer* reducer, const size_t* numbers, const size_t* lengths, size_t count,
                             int32_t is_final, od_error* err) noexcept;
// A rank without inputs calls it while other ranks run forward and backward.
od_status od_reducer_shadow(od_reducer* reducer, od_error* err) noexcept;
od_status od_reducer_divide_by(const od_reducer* reducer, const od_work* active_ranks, int32_t by_world_size,
                               od_error* err) noexcept;
// Times are measured every `steps` steps, and in the first ten; on a GPU only after this call.
od_status od_reducer_set_log_rate(od_reducer* reducer, int32_t steps, od_error* err) noexcept;
od_status od_reducer_log(const od_reducer* reducer, void* visitor, void (*visit)(void*, const char*, const char*),
                         od_error* err) noexcept;

// compress.cpp: float32 on a CPU; see compress.rs
od_status od_sign_compress(const at::Tensor* grad, const at::Tensor* error, at::Tensor** packed, at::Tensor** scale,
                           od_error* err) noexcept;
od_status od_sign_expand(const at::Tensor* packed, float value, const at::Tensor* out, int32_t add,
                         od_error* err) noexcept;
od_status od_take_largest(const at::Tensor* grad, const at::Tensor* error, int64_t kept, at::Tensor** places,
                          at::Tensor** values, od_error* err) noexcept;
}
