// Callbacks for when a parameter's gradient is complete.
#include "grad_hook.h"

#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "backward_passes.h"
#include "guarded.h"
#include "owned.h"

namespace {

using overdrive::Owned;

// The averagers of each parameter's gradient. The last one is in charge; when it is gone, the one before it is.
struct Averagers {
  std::mutex mutex;
  using Averager = std::pair<const overdrive::Averager*, std::weak_ptr<overdrive::Averager>>;
  std::unordered_map<const c10::TensorImpl*, std::vector<Averager>> of;
};

// Never destroyed: backward passes of other threads may outlive static variables.
Averagers& averagers() {
  static auto* made = new Averagers();
  return *made;
}

std::shared_ptr<overdrive::Averager> averager_of(const at::Tensor& param) {
  std::lock_guard<std::mutex> lock(averagers().mutex);
  auto found = averagers().of.find(param.unsafeGetTensorImpl());
  return found == averagers().of.end() ? nullptr : found->second.back().second.lock();
}

struct Hook final : torch::autograd::PostAccumulateGradHook {
  Hook(Owned owner, void (*call)(void*)) : owner(std::move(owner)), call(call) {}
  // `call` catches Rust's panics.
  void operator()(const at::Tensor& param) override {
    if (auto averager = averager_of(param)) return averager->defer_hooks();
    call(owner.get());
  }
  Owned owner;
  void (*call)(void*);
};

}  // namespace

namespace overdrive {

void average(const std::vector<at::Tensor>& params, const std::shared_ptr<Averager>& averager) {
  std::lock_guard<std::mutex> lock(averagers().mutex);
  for (const auto& param : params)
    averagers().of[param.unsafeGetTensorImpl()].emplace_back(averager.get(), averager);
}

void no_longer_average(const std::vector<at::Tensor>& params, const Averager* averager) noexcept {
  std::lock_guard<std::mutex> lock(averagers().mutex);
  for (const auto& param : params) {
    auto found = averagers().of.find(param.unsafeGetTensorImpl());
    if (found == averagers().of.end()) continue;
    auto& all = found->second;
    all.erase(std::remove_if(all.begin(), all.end(), [&](const auto& own) { return own.first == averager; }), all.end());
    if (all.empty()) averagers().of.erase(found);
  }
}

void call_grad_hook(const at::Tensor& param) {
  auto* hook = dynamic_cast<Hook*>(torch::autograd::impl::post_acc_grad_hooks(param).get());
  if (hook != nullptr && param.grad().defined()) hook->call(hook->owner.get());
}

}  // namespace overdrive

od_status od_grad_hook_set(const at::Tensor* tensor, void* owner, void (*call)(void*), void (*drop)(void*),
                           int32_t (*idle)(void*), od_error* err) noexcept {
  Owned owned(owner, drop);
  return overdrive::guarded(err, [&] {
    TORCH_CHECK(tensor->defined() && tensor->requires_grad() && tensor->is_leaf(),
                "a gradient hook needs a leaf tensor that requires a gradient");
    std::unique_ptr<torch::autograd::PostAccumulateGradHook> hook = std::make_unique<Hook>(std::move(owned), call);
    // The previous hook is destroyed after `between_passes`: dropping it runs Rust code, which may do anything.
    overdrive::between_passes(*tensor, [&] {
      auto& place = torch::autograd::impl::post_acc_grad_hooks(*tensor);
      if (place != nullptr) {
        auto* ours = dynamic_cast<Hook*>(place.get());
        TORCH_CHECK(ours != nullptr && idle(ours->owner.get()) != 0, "this tensor already has a gradient hook");
      }
      place.swap(hook);
    });
  });
}
