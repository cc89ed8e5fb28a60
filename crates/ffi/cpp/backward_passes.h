// Counts the backward passes under way, on any thread.
//
// libtorch's engine reads the hooks of parameters without a lock, so a hook may be set or removed only while no pass
// runs.
#pragma once

#include <functional>
#include <memory>

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

namespace overdrive {

// Runs `change`, which changes hooks of these leaves, while no backward pass that may reach a leaf is under way, and
// none can begin. If a leaf is in a graph, waits for the passes of other threads, and throws within a pass of this
// thread.
void between_passes(at::TensorList leaves, const std::function<void()>& change);

// Runs `change`, which must not throw, when no pass runs: at once, or at the end of the last pass under way. Never
// waits. `change` is destroyed afterwards, when passes may begin again. If the process has another engine, such as
// Python's, the end of its passes is unknown: then `change` is kept forever and never run.
void when_no_pass_runs(std::function<void()> change);

// Whether the engine is the one that counts; not if Python's is.
bool has_own_engine();

// The hooks that are set for the calling thread (saved_tensors.cpp), or null.
std::unique_ptr<torch::autograd::SavedVariableHooks> hooks_of_this_thread();

// Whether the calling thread is within a pass.
bool within_pass();

// While one lives, its thread cannot begin a pass: the pass would wait for a lock that the thread holds.
class NoPass {
 public:
  NoPass();
  NoPass(const NoPass&) = delete;
  NoPass& operator=(const NoPass&) = delete;
  ~NoPass();
};

}  // namespace overdrive
