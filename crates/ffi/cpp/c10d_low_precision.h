// Parameters whose passes run on copies of a lower precision.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <utility>
#include <vector>

namespace overdrive {

// Between passes the parameters have their own data, which the optimizer steps; in a pass, from forward to the end of
// backward, copies of `dtype`. The gradients of a pass are of `dtype` too, and become the parameters' when it ends. Those
// of passes before it, which add up, are set aside meanwhile.
class LowPrecision {
 public:
  LowPrecision(std::vector<at::Tensor> params, at::ScalarType dtype) : params_(std::move(params)), dtype_(dtype) {}

  bool is_low() const { return !full_.empty(); }

  void lower() {
    at::NoGradGuard no_grad;
    std::vector<at::Tensor> copies;
    // What may fail comes first.
    for (const auto& param : params_) copies.push_back(param.detach().to(dtype_));
    for (size_t i = 0; i < params_.size(); ++i) {
      full_.push_back(params_[i].variable_data());
      held_.push_back(std::exchange(params_[i].mutable_grad(), at::Tensor()));
      params_[i].set_data(copies[i]);
    }
  }

  // `averaged`: the gradients before this pass are in the average already, except for parameters that no rank has used.
  void raise(bool averaged) {
    at::NoGradGuard no_grad;
    auto full = std::exchange(full_, {});
    auto held = std::exchange(held_, {});
    for (size_t i = 0; i < full.size(); ++i) {
      auto grad = std::exchange(params_[i].mutable_grad(), at::Tensor());
      params_[i].set_data(full[i]);
      if (!grad.defined()) {
        params_[i].mutable_grad() = held[i];
      } else if (averaged || !held[i].defined()) {
        params_[i].mutable_grad() = grad.to(full[i].scalar_type());
      } else {
        params_[i].mutable_grad() = held[i].add_(grad);
      }
    }
  }

 private:
  std::vector<at::Tensor> params_, full_, held_;
  at::ScalarType dtype_;
};

}  // namespace overdrive
