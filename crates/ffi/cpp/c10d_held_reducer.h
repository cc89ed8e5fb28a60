// libtorch's reducer with what DDP needs besides.
#pragma once

#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "backward_passes.h"
#include "c10d_lent_hook.h"
#include "c10d_low_precision.h"
#include "grad_hook.h"

namespace overdrive {

// A Reducer whose next backward can be made local after its forward: only then does gradient accumulation know whether
// the backward pass is a window's last.
class HeldReducer final : public c10d::Reducer,
                          public Averager,
                          public std::enable_shared_from_this<HeldReducer> {
 public:
  using c10d::Reducer::Reducer;
  // Does not throw, because `detach` has removed the hooks before.
  ~HeldReducer() noexcept override {}

  void arm(const std::vector<at::Tensor>& outputs) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      defers_ = false;
      // A static graph counts each parameter's gradients only in its first synchronised backward: discard earlier
      // counts.
      if (static_graph_ && !delayed_)
        for (auto& counted : numGradHooksTriggeredMap_) counted.second = 0;
    }
    prepare_for_backward(outputs);
  }

  void disarm() {
    std::lock_guard<std::mutex> lock(mutex_);
    expect_autograd_hooks_ = false;
  }

  // Call it between passes: removes the hooks from the parameters, after which no pass calls this reducer. The
  // destructor would do it too, but throws if a hook has been removed by other code.
  void detach() noexcept {
    no_longer_average(params_, this);
    try {
      raise(false);
    } catch (...) {
    }
    for (const auto& [key, accumulator] : hooks_) accumulator->del_post_hook(key);
    hooks_.clear();
  }

  void set_hook(std::unique_ptr<c10d::CommHookInterface> hook) {
    std::lock_guard<std::mutex> lock(mutex_);
    register_comm_hook(std::move(hook));
  }

  void compress_to_half() {
    std::lock_guard<std::mutex> lock(mutex_);
    register_builtin_comm_hook(c10d::BuiltinCommHookType::FP16_COMPRESS);
  }

  // The parameters are of a lower precision now, and become so again in each pass.
  void set_low(std::unique_ptr<LowPrecision> low) { low_ = std::move(low); }

  // Begins a pass; false if one has begun already. The parameters' accumulators, which call this reducer, are those of
  // the lower precision; libtorch forgets them when data of another type is set.
  bool lower() {
    std::lock_guard<std::mutex> lock(mutex_);
    // Nothing ends a pass whose backward has failed.
    if (low_ && task_ != NO_TASK) end_low(false);
    if (!low_ || low_->is_low()) return false;
    low_->lower();
    for (size_t i = 0; i < params_.size(); ++i)
      torch::autograd::impl::set_grad_accumulator(params_[i], grad_accumulators_[i]);
    return true;
  }

  void raise(bool averaged) {
    std::lock_guard<std::mutex> lock(mutex_);
    end_low(averaged);
  }

  // The number of the pass in low precision that is under way, or that comes next.
  int64_t pass() {
    std::lock_guard<std::mutex> lock(mutex_);
    return pass_;
  }

  // Called when a backward pass of this number begins. Its end comes before the reducer copies the averages to the
  // gradients, so that they are not rounded.
  void raise_at_end(int64_t pass) {
    bool averaged;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!low_) return;
      auto task = torch::autograd::get_current_graph_task_id();
      if (task_ == task) return;
      TORCH_CHECK(low_->is_low() && pass_ == pass,
                  "mixed precision: another backward pass has ended the pass of this forward, whose parameters are in "
                  "full precision again: run one backward pass for each forward pass, before the next forward");
      task_ = task;
      low_->set_aside();
      averaged = expect_autograd_hooks_;
    }
    torch::autograd::Engine::get_default_engine().queue_callback(
        [self = shared_from_this(), averaged] { self->raise(averaged); });
  }

  // The numbers of each bucket's parameters.
  std::vector<std::vector<size_t>> layout() {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<std::vector<size_t>> numbers;
    for (const auto& bucket : buckets_) numbers.push_back(bucket.variable_indices);
    return numbers;
  }

  // Called by the hook, while the reducer is locked.
  std::optional<LentHook::Place> place(const at::Tensor& buffer) const {
    for (size_t i = 0; i < buckets_.size(); ++i)
      if (buckets_[i].gradients.is_same(buffer))
        return LentHook::Place{i, i + 1 == buckets_.size(), buckets_[i].variables,
                               low_ ? low_->earlier(buckets_[i].variables) : std::vector<at::Tensor>()};
    return std::nullopt;
  }

  bool is_final() {
    std::lock_guard<std::mutex> lock(mutex_);
    return has_rebuilt_bucket_;
  }

  // Call it between passes. Checks first: `initialize_buckets` fails halfway.
  void lay_out(std::vector<std::vector<size_t>> buckets, bool is_final) {
    std::lock_guard<std::mutex> lock(mutex_);
    std::vector<bool> seen(params_.size());
    size_t count = 0;
    for (const auto& bucket : buckets) {
      for (auto number : bucket) {
        TORCH_CHECK(number < params_.size() && !seen[number], "a layout has each parameter once");
        const auto &param = params_[number], &first = params_[bucket[0]];
        TORCH_CHECK(param.scalar_type() == first.scalar_type() && param.device() == first.device() &&
                        (bucket.size() == 1 || !expect_sparse_gradients_[number]),
                    "a bucket's gradients are dense, of one dtype, and on one device");
        seen[number] = true;
        ++count;
      }
      TORCH_CHECK(!bucket.empty(), "a bucket has a parameter");
    }
    TORCH_CHECK(count == params_.size(), "a layout has each parameter once");
    TORCH_CHECK(!static_graph_, "the buckets of a static graph are known after its first passes alone");
    TORCH_CHECK(!expect_autograd_hooks_, "a forward pass has begun whose backward pass has not run");
    ensure_prior_reduction_finished();
    // What is known of the gradients' order belongs to the passes so far.
    if (has_rebuilt_bucket_ == is_final && std::equal(buckets_.begin(), buckets_.end(), buckets.begin(), buckets.end(),
                                                      [](const Bucket& bucket, const std::vector<size_t>& numbers) {
                                                        return bucket.variable_indices == numbers;
                                                      }))
      return;
    has_rebuilt_bucket_ = is_final;
    rebuilt_params_.clear();
    rebuilt_param_indices_.clear();
    initialize_buckets(std::move(buckets));
  }

  // Gradient hooks run at the end of this pass, when the gradients are averaged; a pass that leaves gradients local
  // calls none.
  void defer_hooks() override {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!expect_autograd_hooks_ || std::exchange(defers_, true)) return;
    }
    // The reducer queues its own final callback after this one, but before the callback that this one queues.
    auto& engine = torch::autograd::Engine::get_default_engine();
    engine.queue_callback([&engine, self = shared_from_this()] {
      engine.queue_callback([self] { self->call_hooks(); });
    });
  }

  // Hands the accumulated gradients to the reducer, as a backward pass would that adds nothing to them. Runs within a
  // backward pass, because the reducer finishes its work at the end of one.
  void hand_over() {
    defer_hooks();
    std::lock_guard<std::mutex> lock(mutex_);
    has_marked_unused_parameters_ = true;
    // The likely order of the gradients on the other ranks.
    for (size_t index = params_.size(); index-- > 0;) {
      auto unused = std::find(unused_parameters_.begin(), unused_parameters_.end(), index);
      // The reducer itself adds parameters that a static graph never reaches.
      if (should_rebuild_buckets() && unused == unused_parameters_.end()) push_rebuilt_params(index);
      mark_variable_ready(index);
    }
  }

  // False before a static graph's first synchronised backward, which has to reach parameters because it counts them.
  bool may_hand_over() {
    std::lock_guard<std::mutex> lock(mutex_);
    return !static_graph_ || delayed_;
  }

  // The tensor from which the backward pass of `hand_over` starts.
  at::Tensor origin() const { return at::zeros({}, params_[0].options()).set_requires_grad(true); }

  // Zero, computed from every parameter that has a gradient, or from all parameters if none has one.
  at::Tensor zero() const {
    auto reached = [](const at::Tensor& param) { return param.grad().defined(); };
    bool all = std::none_of(params_.begin(), params_.end(), reached);
    auto zero = at::zeros({}, at::kDouble);
    for (const auto& param : params_)
      if (all || reached(param)) zero = zero + (param.sum() * 0).to(at::kCPU, at::kDouble);
    return zero;
  }

  // Whether the backward that begins is a static graph's first, which reduces everything at its end. True only once.
  bool takes_delay() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!static_graph_ || delayed_ || !expect_autograd_hooks_) return false;
    delayed_ = true;
    return true;
  }

  bool needs_sink() {
    std::lock_guard<std::mutex> lock(mutex_);
    return low_ || (static_graph_ ? !delayed_ : find_unused_parameters_);
  }
  bool finds_unused() const { return find_unused_parameters_ && !static_graph_; }

 private:
  void call_hooks() {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      defers_ = false;
      // The pass did not reach all parameters: the next forward pass reports that.
      if (expect_autograd_hooks_) return;
    }
    for (const auto& param : params_) call_grad_hook(param);
  }

  void end_low(bool averaged) {
    task_ = NO_TASK;
    if (!low_ || !low_->is_low()) return;
    low_->raise(averaged);
    ++pass_;
  }

  static constexpr int NO_TASK = -1;

  std::unique_ptr<LowPrecision> low_;
  int task_ = NO_TASK;  // the backward pass at whose end the pass in low precision ends
  int64_t pass_ = 0;
  bool delayed_ = false;
  bool defers_ = false;  // the hooks of the pass under way are queued
};

}  // namespace overdrive
