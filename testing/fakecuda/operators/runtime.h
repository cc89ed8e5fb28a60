// What the operators ask of the runtime's stand-in; `runtime/src/api/operators.rs` has the other side.
#pragma once

#include <cstddef>
#include <cstdint>

extern "C" {

// Bytes that an operator reads or writes, by their addresses on the device.
struct fakecuda_range {
  const void* at;
  size_t bytes;
  bool writes;
};

// Where the host finds the byte of a device address.
void* fakecuda_host(const void* at);

// How many kernels this thread has launched, and the stream of the last one.
uint64_t fakecuda_launched();
void* fakecuda_last_stream();

// The operator that this thread is within, or null: what a kernel outside of all of them writes is not known.
void fakecuda_within(const char* name);

// Lets a stream's work run, for results that the host has already waited for.
void fakecuda_finish(void* stream);

// Counts a kernel of a library, and puts it into a stream.
int fakecuda_launch(const char* kernel, void* stream);

// Puts an operator's numbers into a stream: `run` is called when its turn comes, `drop` once nobody will call it again.
// Both are called with the stand-in's lock held: they must not call anything of CUDA.
int fakecuda_operator(void* stream, const char* name, const fakecuda_range* ranges, size_t count, void (*run)(void*),
                      void (*drop)(void*), void* data);

// The host has written these bytes of the device.
void fakecuda_known(const void* at, size_t bytes);

// Poison: bytes that nobody has computed, by the name of what should have. `fakecuda_poison_of` is null if all are known.
// The addresses are those of `fakecuda_host`.
void fakecuda_poison(const void* at, size_t bytes, const char* name);
const char* fakecuda_poison_of(const void* at, size_t bytes);
}
