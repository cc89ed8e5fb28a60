// Copies between a GPU and host memory beside the computation.
#pragma once

#include "overdrive.h"

extern "C" {

typedef struct od_side_stream od_side_stream;
typedef struct od_transfer od_transfer;

// side_stream.cpp
od_status od_side_stream_new(int32_t device, od_side_stream** out, od_error* err) noexcept;
void od_side_stream_free(od_side_stream* side) noexcept;
// The host waits for all copies.
od_status od_side_stream_synchronize(const od_side_stream* side, od_error* err) noexcept;
// Starts a copy after the work that the calling thread's current stream was given so far. One of the two tensors is on
// the stream's device, the other one on the host; both have the same sizes and type.
od_status od_side_stream_copy(const od_side_stream* side, const at::Tensor* from, const at::Tensor* to, od_transfer** out,
                              od_error* err) noexcept;
// The tensor on the device. The calling thread's current stream waits for the copy.
od_status od_transfer_tensor(od_transfer* transfer, at::Tensor** out, od_error* err) noexcept;
// The stream from which the copy was started waits for it. Then the device's memory is free for the work that this
// stream is given next.
void od_transfer_free(od_transfer* transfer) noexcept;
}
