// Results of chosen operators, kept in one run of a function and reused in the next.
#pragma once

#include "overdrive.h"

extern "C" {

typedef struct od_keeper od_keeper;

// keep.cpp. `keeps` says whether the result of an operator is kept; `call` counts the operator's calls in this run.
// `ran` may be null: it is told of each result of a call that is not kept in the first run, after `keeps` was asked
// about the call, and how long it took. `owner` is dropped with the keeper, or when there is none.
od_status od_keeper_new(void* owner,
                        int32_t (*keeps)(void* owner, size_t call, const char* name, const char* overload),
                        void (*ran)(void* owner, uint64_t nanoseconds, const void* result, size_t bytes),
                        void (*drop)(void*), od_keeper** out, od_error* err) noexcept;
// From now on, until od_keeper_end, results of the calling thread's operators are kept or, from the first one on,
// reused.
od_status od_keeper_begin(od_keeper* keeper, int32_t reuse, od_error* err) noexcept;
void od_keeper_end(od_keeper* keeper) noexcept;
// Marks what is kept so far as needed. od_keeper_finish frees what was kept after the last call of this, and what was
// changed in place.
void od_keeper_need(od_keeper* keeper) noexcept;
void od_keeper_finish(od_keeper* keeper) noexcept;
size_t od_keeper_bytes(od_keeper* keeper) noexcept;
void od_keeper_free(od_keeper* keeper) noexcept;
}

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/FunctionRef.h>

namespace overdrive {

// Runs an operator, or puts its kept results in place of its arguments.
void run_or_reuse(const c10::OperatorHandle& op, torch::jit::Stack& stack, c10::function_ref<void()> run);

}  // namespace overdrive
