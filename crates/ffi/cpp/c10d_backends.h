// Constructors of a process group's backends; each is defined in the file that includes its headers.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d.h"

namespace overdrive {

c10::intrusive_ptr<c10d::Backend> new_gloo(const c10::intrusive_ptr<c10d::Store>& store,
                                           const od_group_options& options);
c10::intrusive_ptr<c10d::Backend> new_nccl(const c10::intrusive_ptr<c10d::Store>& store,
                                           const od_group_options& options);
// A wrapper of `backend` that compares each collective over ranks, using `helper`, before it runs.
c10::intrusive_ptr<c10d::Backend> verified(const c10::intrusive_ptr<c10d::Backend>& backend,
                                           const c10::intrusive_ptr<c10d::Backend>& helper);
// Whether a backend of `new_gloo` has no work queued or under way.
bool gloo_is_idle(c10d::Backend& backend);

}  // namespace overdrive
