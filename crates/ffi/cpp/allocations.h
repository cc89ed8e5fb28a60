// Watches what libtorch allocates and frees.
//
// The allocators report while they hold their own lock, so a watcher must not call libtorch.
#pragma once

#include "overdrive.h"

typedef struct od_watch od_watch;

enum { OD_ALLOCATED = 0, OD_FREED = 1, OD_BACKWARD_BEGINS = 2, OD_BACKWARD_ENDS = 3 };

extern "C" {

// From now on `on_event` is called with `owner`, by one thread at a time, until the watch is ended. `device` is -1 for
// the host. `drop` is called with it once, at the end or when this call fails.
od_status od_watch_begin(void* owner,
                         void (*on_event)(void* owner, int32_t event, uint64_t address, uint64_t bytes, int32_t device),
                         void (*drop)(void*), od_watch** out, od_error* err) noexcept;
void od_watch_end(od_watch* watch) noexcept;

}

namespace overdrive {

// Whether anybody watches.
bool is_watched() noexcept;

void report(int32_t event, const void* address, size_t bytes, int32_t device) noexcept;

// Makes the host's allocator report (host_allocator.cpp).
void watch_host_memory();

// Makes CUDA's allocator report (cuda.cpp), if there is a device.
void watch_device_memory();

}  // namespace overdrive
