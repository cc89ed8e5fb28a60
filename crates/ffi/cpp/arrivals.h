// Copies to a device, each of which holds up only what uses its tensor.
#pragma once

#include "overdrive.h"
#include "side_stream.h"

extern "C" {

typedef struct od_arrivals od_arrivals;

// arrivals.cpp. Takes transfers to tensors of a device, also when it fails. The first operator, on any thread, that
// uses one of the tensors or what shares its memory makes the stream that it is for wait for the copy; any other access
// throws.
od_status od_arrivals_new(od_transfer* const* transfers, size_t n, od_arrivals** out, od_error* err) noexcept;
// The stream from which the copies were started, and the current one, wait for all others. Writes the places of the
// tensors that were used to `used`, which has room for all, in the order of their first uses.
od_status od_arrivals_finish(od_arrivals* arrivals, size_t* used, size_t* n_used, od_error* err) noexcept;
// As `finish`.
void od_arrivals_free(od_arrivals* arrivals) noexcept;
}

namespace overdrive {

// For code that reads memory without an operator: the current stream waits for copies to this tensor.
void arrive(const at::Tensor& tensor);

}  // namespace overdrive
