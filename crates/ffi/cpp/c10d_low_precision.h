// Parameters whose passes run on copies of a lower precision.
#pragma once

#include <ATen/ATen.h>
#include <torch/csrc/autograd/variable.h>

#include <unordered_map>
#include <utility>
#include <vector>

namespace overdrive {

// Between passes the parameters have their own data, which the optimizer steps; in a pass, from forward to the end of
// backward, copies of `dtype`. The gradients of a backward pass are of `dtype` too, and become the parameters' when it
// ends. Those of passes before it, which add up, are set aside meanwhile.
class LowPrecision {
 public:
  LowPrecision(const std::vector<at::Tensor>& params, at::ScalarType dtype) : dtype_(dtype) {
    // A frozen one may be given by several names.
    for (const auto& param : params)
      if (places_.emplace(param.unsafeGetTensorImpl(), params_.size()).second) params_.push_back(param);
  }

  bool is_low() const { return !full_.empty(); }

  void lower() {
    at::NoGradGuard no_grad;
    std::vector<at::Tensor> copies, full;
    // What may fail comes first.
    for (const auto& param : params_) {
      copies.push_back(param.detach().to(dtype_));
      full.push_back(param.variable_data());
    }
    full_ = std::move(full);
    for (size_t i = 0; i < params_.size(); ++i) params_[i].set_data(copies[i]);
  }

  // A backward pass begins. What an earlier one has left before it failed is of `dtype`, and is added up too.
  void set_aside() {
    at::NoGradGuard no_grad;
    held_.resize(params_.size());
    for (size_t i = 0; i < params_.size(); ++i) {
      auto grad = std::exchange(params_[i].mutable_grad(), at::Tensor());
      if (grad.defined()) held_[i] = held_[i].defined() ? held_[i].add_(grad) : grad.to(full_[i].scalar_type());
    }
  }

  // What was set aside of these parameters; undefined where there is nothing.
  std::vector<at::Tensor> earlier(const std::vector<at::Tensor>& params) const {
    std::vector<at::Tensor> found;
    for (const auto& param : params) {
      auto place = places_.find(param.unsafeGetTensorImpl());
      found.push_back(place == places_.end() || held_.empty() ? at::Tensor() : held_[place->second]);
    }
    return found;
  }

  // `averaged`: what was set aside is in the average already, except for parameters that no rank has used.
  void raise(bool averaged) {
    at::NoGradGuard no_grad;
    auto full = std::exchange(full_, {});
    auto held = std::exchange(held_, {});
    held.resize(full.size());
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
  std::unordered_map<c10::TensorImpl*, size_t> places_;
  at::ScalarType dtype_;
};

}  // namespace overdrive
