#include "backward_passes.h"

#include <algorithm>
#include <condition_variable>
#include <mutex>
#include <utility>
#include <vector>

#include <c10/util/Exception.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>
#include <torch/csrc/autograd/variable.h>

#include "allocations.h"

namespace {

using Changes = std::vector<std::function<void()>>;
using torch::autograd::edge_list;
using torch::autograd::Engine;
using torch::autograd::variable_list;

bool counts();

struct Passes {
  std::mutex mutex;
  std::condition_variable none;
  size_t count = 0;
  Changes waiting;

  void begin() {
    std::lock_guard<std::mutex> lock(mutex);
    ++count;
  }

  void end() {
    Changes done;  // destroyed after the lock is released, when passes may begin again
    std::lock_guard<std::mutex> lock(mutex);
    if (--count > 0) return;
    none.notify_all();
    if (!counts()) return;
    done.swap(waiting);
    for (const auto& change : done) change();
  }
};

// Never destroyed, like the engine below: threads may outlive static variables.
Passes& passes() {
  static auto* made = new Passes();
  return *made;
}

thread_local int forbidden = 0;

// The engine, with a count of running passes, and hooks of saved tensors. A pass within another counts too, on whatever
// thread it runs.
struct CountingEngine final : Engine {
  variable_list execute(const edge_list& roots, const variable_list& inputs, bool keep_graph, bool create_graph,
                        bool accumulate_grad, const edge_list& outputs) override {
    TORCH_CHECK(forbidden == 0, "a communication hook cannot run a backward pass: its reducer is in the middle of one");
    struct Pass {
      Pass() {
        passes().begin();
        overdrive::report(OD_BACKWARD_BEGINS, nullptr, 0, -1);
      }
      Pass(const Pass&) = delete;
      Pass& operator=(const Pass&) = delete;
      ~Pass() {
        overdrive::report(OD_BACKWARD_ENDS, nullptr, 0, -1);
        passes().end();
      }
    } pass;
    return Engine::execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }

  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    return overdrive::hooks_of_this_thread();
  }
};

Engine& counting_engine() {
  static auto* made = new CountingEngine();
  return *made;
}

bool counts() { return &Engine::get_default_engine() == &counting_engine(); }

// Installed before any pass. Python's engine, which handles the GIL, is not replaced.
__attribute__((constructor)) void install() {
  if (&Engine::get_default_engine() == &Engine::get_base_engine())
    torch::autograd::set_default_engine_stub(&counting_engine);
}

}  // namespace

namespace overdrive {

bool has_own_engine() { return counts(); }

bool within_pass() { return torch::autograd::get_current_graph_task_id() != -1; }

NoPass::NoPass() { ++forbidden; }
NoPass::~NoPass() { --forbidden; }

void between_passes(at::TensorList leaves, const std::function<void()>& change) {
  // A pass can reach a leaf only after a graph has made its gradient accumulator.
  auto is_reached = [](const at::Tensor& leaf) {
    return torch::autograd::impl::try_get_grad_accumulator(leaf) != nullptr;
  };
  auto may_change = [&] { return passes().count == 0 || std::none_of(leaves.begin(), leaves.end(), is_reached); };
  std::unique_lock<std::mutex> lock(passes().mutex);
  TORCH_CHECK(!within_pass() || may_change(),
              "the hooks of a gradient cannot be set within a backward pass that may call them: set them before or "
              "after it");
  passes().none.wait(lock, may_change);
  change();
}

void when_no_pass_runs(std::function<void()> change) {
  std::lock_guard<std::mutex> lock(passes().mutex);
  if (passes().count > 0 || !counts())
    passes().waiting.push_back(std::move(change));
  else
    change();
}

}  // namespace overdrive
