// Coordinates gradient hooks with reducers that average gradients over ranks.
#pragma once

#include <memory>
#include <vector>

#include <ATen/core/Tensor.h>

namespace overdrive {

// Averages the gradients of parameters. They are complete only then, so their hooks wait for it.
class Averager {
 public:
  virtual ~Averager() = default;
  // A backward pass has added to a gradient whose hook waits. Called within the pass.
  virtual void defer_hooks() = 0;
};

// From here on `averager` calls the hooks of these parameters' gradients, by `call_grad_hook`.
void average(const std::vector<at::Tensor>& params, const std::shared_ptr<Averager>& averager);
// Ends that; an averager registered before or since stays in charge.
void no_longer_average(const std::vector<at::Tensor>& params, const Averager* averager) noexcept;
// Calls the hook of a complete gradient, if there is one.
void call_grad_hook(const at::Tensor& param);

}  // namespace overdrive
