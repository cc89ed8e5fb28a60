// Tensors whose memory comes and goes.
#pragma once

#include "overdrive.h"

extern "C" {

// on_demand.cpp. Gives the tensor a dtype and new memory of so many bytes, of which nothing is there yet: any access
// throws with this message. Fails if the tensor is not contiguous.
od_status od_on_demand_new(const at::Tensor* tensor, int32_t scalar_type, size_t bytes, const char* message,
                           od_error* err) noexcept;
// Moves the memory of `from`, as large, to the tensor and all that share its memory. `from` has none afterwards.
od_status od_on_demand_fill(const at::Tensor* tensor, const at::Tensor* from, const char* message,
                            od_error* err) noexcept;
// Frees the memory. Tensors that share it keep it in name: any access throws with this message.
od_status od_on_demand_free(const at::Tensor* tensor, const char* message, od_error* err) noexcept;
}
