// What the operators ask of the runtime's stand-in; `runtime/src/api/operators.rs` has the other side.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// Bytes that an operator reads, writes, or both, by their addresses on the device. `element`: the bytes of one number.
struct fakecuda_range {
  const void* at;
  size_t bytes;
  size_t element;
  bool reads;
  bool writes;
};

// Where the host finds the byte of a device address.
void* fakecuda_host(const void* at) noexcept;

// How many kernels this thread has launched, and the stream of the last one.
uint64_t fakecuda_launched() noexcept;
void* fakecuda_last_stream() noexcept;

// The operator that this thread is within, or null: what a kernel outside of all of them writes is not known.
void fakecuda_within(const char* name) noexcept;

// Lets a stream's work run, for results that the host has already waited for.
void fakecuda_finish(void* stream) noexcept;

// Counts a kernel of a library, and puts it into a stream.
int fakecuda_launch(const char* kernel, void* stream) noexcept;

// Puts an operator's numbers into a stream: `run` is called when its turn comes, twice if it may use what nobody has
// computed, and returns why it failed, or null; `drop` once nobody will call it again. Both are called with the stand-in's
// lock held: they must not call anything of CUDA.
int fakecuda_operator(void* stream, const char* name, const fakecuda_range* ranges, size_t count,
                      const char* (*run)(void*), void (*drop)(void*), void* data) noexcept;

// An operator has allocated these bytes and not written them: they are poison from this place of the stream on.
int fakecuda_unwritten(void* stream, const char* name, const void* at, size_t bytes) noexcept;

// The operator that runs has a result at these bytes of the host that it cannot compute.
void fakecuda_not_computed(const void* at, size_t bytes) noexcept;
}
