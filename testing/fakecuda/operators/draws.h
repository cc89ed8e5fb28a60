// The random numbers of a device: other ones than the host draws, and a function of the device's generator alone.
#pragma once

#include <algorithm>
#include <array>
#include <mutex>
#include <optional>
#include <random>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/stack.h>
#include <ATen/cuda/CUDAGeneratorImpl.h>
#include <c10/util/ScopeExit.h>

#include "runtime.h"
#include "snapshot.h"

namespace fakecuda {

// Where the device's generator stands before an operator draws from it: its seed, and how much was drawn since that was
// set. No two draws begin at the same place, and a graph's begin where its launch says.
class Draws {
 public:
  // Nothing for an operator that draws no numbers. `arguments`: the operator's, at the end of the stack.
  static std::optional<Draws> of(const c10::OperatorHandle& op, const torch::jit::Stack& stack) {
    const auto& declared = op.schema().arguments();
    auto first = stack.end() - static_cast<std::ptrdiff_t>(declared.size());
    std::optional<size_t> at;
    for (size_t i = 0; i < declared.size(); ++i)
      if (declared[i].name() == "generator") at = i;
    if (!at && !op.hasTag(at::Tag::nondeterministic_seeded)) return {};
    if (at && first[static_cast<std::ptrdiff_t>(*at)].isGenerator())
      return Draws(first[static_cast<std::ptrdiff_t>(*at)].toGenerator(), at);
    auto tensor = std::find_if(first, stack.end(),
                               [](const auto& value) { return value.isTensor() && on_device(value.toTensor()); });
    if (tensor == stack.end()) return {};
    return Draws(at::cuda::detail::getDefaultCUDAGenerator(tensor->toTensor().device().index()), at);
  }

  // Runs the operator of the host, which draws from a generator of its own: also at the second time the same numbers.
  template <class Run>
  void with(torch::jit::Stack& arguments, Run run) const {
    if (at_) {
      arguments[*at_] = at::detail::createCPUGenerator(seed());
      return run();
    }
    // It takes no generator: the host's own one, which must not move because a device draws numbers.
    auto host = at::detail::getDefaultCPUGenerator();
    auto change = [&](auto change) {
      std::lock_guard<std::mutex> lock(host.mutex());
      return change();
    };
    auto before = change([&] { return host.get_state(); });
    auto restore = c10::make_scope_exit([&] { change([&] { host.set_state(before); }); });
    change([&] { host.set_current_seed(seed()); });
    run();
  }

 private:
  Draws(at::Generator generator, std::optional<size_t> at) : at_(at) {
    std::lock_guard<std::mutex> lock(generator.mutex());
    state_ = at::check_generator<at::CUDAGeneratorImpl>(generator)->philox_cuda_state(0);
    if (state_.captured_) {
      state_.seed_.ptr = static_cast<int64_t*>(fakecuda_host(state_.seed_.ptr));
      state_.offset_.ptr = static_cast<int64_t*>(fakecuda_host(state_.offset_.ptr));
    }
  }

  uint64_t seed() const {
    auto of = [&](const at::PhiloxCudaState::Payload& it) {
      return state_.captured_ ? static_cast<uint64_t>(*it.ptr) : it.val;
    };
    uint64_t seed = of(state_.seed_), offset = of(state_.offset_) + state_.offset_intragraph_;
    std::array<uint64_t, 2> numbers{seed, offset};
    std::array<uint32_t, 4> halves{};
    for (size_t i = 0; i < 4; ++i) halves[i] = static_cast<uint32_t>(numbers[i / 2] >> (i % 2 * 32));
    std::array<uint32_t, 1> mixed{};
    std::seed_seq(halves.begin(), halves.end()).generate(mixed.begin(), mixed.end());
    return mixed[0];
  }

  // The place of the operator's argument for a generator, if it has one.
  std::optional<size_t> at_;
  at::PhiloxCudaState state_;
};

}  // namespace fakecuda
