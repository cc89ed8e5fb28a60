#include "decided.h"

#include <set>

#include <c10/cuda/CUDAStream.h>

#include "snapshot.h"

namespace fakecuda {

bool is_decided_on_host(const std::string& name) {
  static const std::set<std::string> names = {
      "aten::nonzero",     "aten::masked_select", "aten::_unique2",          "aten::unique_dim",
      "aten::_unique",     "aten::bincount",      "aten::unique_consecutive", "aten::unique_dim_consecutive",
      "aten::repeat_interleave", "aten::equal",
  };
  return names.count(name) > 0;
}

void decide_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  auto stream = c10::cuda::getCurrentCUDAStream();
  for (const char* part : {", size", ", values"}) {
    fakecuda_launch((schema.name() + part).c_str(), stream.stream());
  }
  stream.synchronize();

  auto first = stack->end() - static_cast<std::ptrdiff_t>(schema.arguments().size());
  c10::Device device(c10::kCUDA, stream.device_index());
  std::vector<fakecuda_range> ranges;
  torch::jit::Stack host;
  for (auto it = first; it != stack->end(); ++it) host.push_back(snapshot(*it, Use::READ, ranges));
  stack->erase(first, stack->end());
  {
    OnHost on_host_only;
    op.callBoxed(host);
  }
  for (const auto& value : host) {
    if (!value.isTensor() || !value.toTensor().defined()) {
      stack->push_back(value);
      continue;
    }
    auto result = value.toTensor().contiguous();
    auto own = at::empty(result.sizes(), result.options().device(device));
    if (own.numel() > 0) over(own).copy_(result);
    fakecuda_known(own.numel() > 0 ? own.const_data_ptr() : nullptr, own.nbytes());
    stack->push_back(own);
  }
}

}  // namespace fakecuda
