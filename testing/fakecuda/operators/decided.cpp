#include "decided.h"

#include <memory>
#include <set>

#include <ATen/record_function.h>
#include <c10/cuda/CUDAStream.h>

#include "snapshot.h"

namespace fakecuda {

bool is_decided_on_host(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::nonzero",     "aten::masked_select", "aten::_unique2",          "aten::unique_dim",
      "aten::_unique",     "aten::bincount",      "aten::unique_consecutive", "aten::unique_dim_consecutive",
      "aten::repeat_interleave", "aten::equal",      "aten::_coalesce",
  };
  return names.count(name) > 0;
}

namespace {

// The operator's part on the device: it runs when the stream comes to it.
struct Decision {
  c10::OperatorHandle op;
  torch::jit::Stack values;
  std::exception_ptr failure;

  void run() {
    at::RecordFunctionGuard unseen(false);
    OnHost on_host_only;
    try {
      op.callBoxed(values);
    } catch (...) {
      failure = std::current_exception();
    }
  }
};

// Puts `run` into the stream, over these bytes; it is `RUN`'s to keep what it needs.
template <class RUN>
void push(const c10::cuda::CUDAStream& stream, const std::string& name, const std::vector<fakecuda_range>& ranges,
          RUN run) {
  int failed = fakecuda_operator(
      stream.stream(), name.c_str(), ranges.data(), ranges.size(),
      [](void* own) -> const char* {
        (*static_cast<RUN*>(own))();
        return nullptr;
      },
      [](void* own) { delete static_cast<RUN*>(own); }, new RUN(std::move(run)));
  TORCH_CHECK(failed == 0, name, " could not be put into its stream");
}

void launch(const c10::cuda::CUDAStream& stream, const std::string& name) {
  TORCH_CHECK(fakecuda_launch(name.c_str(), stream.stream()) == 0, name, " could not be launched");
}

}  // namespace

void decide_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto stream = c10::cuda::getCurrentCUDAStream();
  c10::Device device(c10::kCUDA, stream.device_index());
  auto first = stack->end() - static_cast<std::ptrdiff_t>(schema.arguments().size());
  std::vector<fakecuda_range> ranges;
  auto decision = std::make_shared<Decision>(Decision{op, {}, {}});
  for (auto it = first; it != stack->end(); ++it) decision->values.push_back(snapshot(*it, Use::READ, ranges));

  launch(stream, schema.name() + ", size");
  push(stream, schema.name(), ranges, [decision] { decision->run(); });
  stream.synchronize();
  if (decision->failure) std::rethrow_exception(decision->failure);
  launch(stream, schema.name() + ", values");
  stack->erase(first, stack->end());
  auto to_device = [&](const at::Tensor& from) {
    auto result = from.contiguous();
    auto own = at::empty(result.sizes(), result.options().device(device));
    std::vector<fakecuda_range> written;
    auto target = snapshot(own, Use::RESULT, written).toTensor();
    push(stream, schema.name(), written, [target, result] {
      OnHost on_host_only;
      target.copy_(result);
    });
    return own;
  };
  for (const auto& value : decision->values) {
    if (!value.isTensor() || !value.toTensor().defined()) {
      stack->push_back(value);
    } else if (const auto& result = value.toTensor(); result.is_sparse()) {
      auto indices = to_device(result._indices()), values = to_device(result._values());
      auto options = values.options().layout(at::kSparse);
      stack->push_back(
          at::_sparse_coo_tensor_unsafe(indices, values, result.sizes(), options, result.is_coalesced()));
    } else {
      stack->push_back(to_device(result));
    }
  }
}

}  // namespace fakecuda
