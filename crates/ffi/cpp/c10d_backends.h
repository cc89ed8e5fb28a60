// Constructors of a process group's backends; each is defined in the file that includes its headers.
#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "c10d.h"

namespace overdrive {

c10::intrusive_ptr<c10d::Backend> new_gloo(const c10::intrusive_ptr<c10d::Store>& store,
                                           const od_group_options& options);
c10::intrusive_ptr<c10d::Backend> new_nccl(const c10::intrusive_ptr<c10d::Store>& store,
                                           const od_group_options& options);
// Takes part in a split of the communicator as a rank that is a member of no part.
void split_none(const od_group& group, int32_t device);
// A wrapper of `backend` that compares each collective over ranks, using `helper`, before it runs.
c10::intrusive_ptr<c10d::Backend> verified(const c10::intrusive_ptr<c10d::Backend>& backend,
                                           const c10::intrusive_ptr<c10d::Backend>& helper);
// Whether a backend has no work queued or under way. NCCL's may say so a tenth of a second after the fact.
bool gloo_is_idle(c10d::Backend& backend);
// Whether a collective was begun, over Gloo, in which each member hears of all others.
bool gloo_has_met(c10d::Backend& backend);
bool nccl_is_idle(c10d::Backend& backend);
// The watchdog of NCCL's backend no longer ends the process when work fails: whoever aborts the group knows of it.
void nccl_outlives_failures(c10d::Backend& backend);
// Its flight recorder, as JSON.
std::string nccl_record(bool only_active);

}  // namespace overdrive
