// Which backward passes are under way, on any thread.
//
// libtorch's engine reads the hooks of parameters without a lock: whoever sets or removes one does it while no pass
// runs.
#pragma once

#include <functional>

#include <ATen/core/Tensor.h>

namespace overdrive {

// Runs `change`, to hooks of these leaves, while no backward pass that may reach one is under way and none can begin:
// where a graph has one in it, it waits for the passes of other threads. Throws within one of the calling thread.
void between_passes(at::TensorList leaves, const std::function<void()>& change);

// Runs `change`, which throws nothing, in the same way; within a pass, at its end. Never waits. What `change` holds is
// destroyed behind it, when passes may begin again. Where the engine is another's, as in a process of Python's, nobody
// knows when that is: then `change` is kept for ever and never run.
void when_no_pass_runs(std::function<void()> change);

// Whether the calling thread is within a pass.
bool within_pass();

// While one lives, its thread begins no pass: that would wait for a lock which the thread has.
class NoPass {
 public:
  NoPass();
  NoPass(const NoPass&) = delete;
  NoPass& operator=(const NoPass&) = delete;
  ~NoPass();
};

}  // namespace overdrive
