// Where hooks of gradients and what averages gradients over ranks meet.
#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace overdrive {

// Averages the gradients of parameters, which are complete only then: their hooks wait for it.
class Averager {
 public:
  virtual ~Averager() = default;
  // A backward pass has added to a gradient whose hook waits. Called within the pass.
  virtual void defer_hooks() = 0;
};

// From here on the hooks of these parameters' gradients are left to `averager`, which calls them by `call_grad_hook`.
void average(const std::vector<at::Tensor>& params, const std::shared_ptr<Averager>& averager);
// Ends that for parameters that have not been given to another meanwhile.
void no_longer_average(const std::vector<at::Tensor>& params, const Averager* averager) noexcept;
// Calls the hook of a complete gradient, if there is one.
void call_grad_hook(const at::Tensor& param);

}  // namespace overdrive
