// A callback for the moment in which a parameter's gradient is complete.
#include <memory>

#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "guarded.h"

namespace {

// What Rust lent, given back once.
class Owned {
 public:
  Owned(void* owner, void (*drop)(void*)) : owner_(owner), drop_(drop) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Owned(Owned&& other) noexcept : owner_(std::exchange(other.owner_, nullptr)), drop_(other.drop_) {}
  ~Owned() {
    if (owner_ != nullptr) drop_(owner_);
  }
  void* get() const { return owner_; }

 private:
  void* owner_;
  void (*drop_)(void*);
};

struct Hook final : torch::autograd::PostAccumulateGradHook {
  Hook(Owned owner, void (*call)(void*)) : owner(std::move(owner)), call(call) {}
  // `call` catches Rust's panics.
  void operator()(const at::Tensor&) override { call(owner.get()); }
  Owned owner;
  void (*call)(void*);
};

}  // namespace

od_status od_grad_hook_set(const at::Tensor* tensor, void* owner, void (*call)(void*), void (*drop)(void*),
                           int32_t (*idle)(void*), od_error* err) noexcept {
  Owned owned(owner, drop);
  return overdrive::guarded(err, [&] {
    TORCH_CHECK(tensor->defined() && tensor->requires_grad() && tensor->is_leaf(),
                "a hook for gradients needs a leaf that requires one");
    const auto& taken = torch::autograd::impl::post_acc_grad_hooks(*tensor);
    if (taken != nullptr) {
      auto* ours = dynamic_cast<Hook*>(taken.get());
      TORCH_CHECK(ours != nullptr && idle(ours->owner.get()) != 0, "this tensor has a hook for its gradient already");
    }
    torch::autograd::impl::set_post_acc_grad_hooks(*tensor, std::make_unique<Hook>(std::move(owned), call));
  });
}
