// The leaves that a part of the forward pass uses.
#pragma once

#include "overdrive.h"

extern "C" {

// leaves.cpp. Begins a part of the forward pass on the calling thread.
typedef struct od_leaves od_leaves;
od_status od_leaves_new(od_leaves** out, od_error* err) noexcept;
// Notes the leaves from which the tensor was computed since then, and their versions.
od_status od_leaves_see(od_leaves* leaves, const at::Tensor* tensor, od_error* err) noexcept;
// Ends the part.
void od_leaves_finish(od_leaves* leaves) noexcept;
// A leaf that was changed in place since, or null.
od_status od_leaves_changed(const od_leaves* leaves, at::Tensor** out, od_error* err) noexcept;
void od_leaves_free(od_leaves* leaves) noexcept;
}
