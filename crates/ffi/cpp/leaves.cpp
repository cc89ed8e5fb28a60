// The leaves that a part of the forward pass uses, also those that no operator saves, such as biases.
#include "leaves.h"

#include <mutex>
#include <unordered_set>
#include <vector>

#include <ATen/SequenceNumber.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>

#include "guarded.h"

namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;
using TensorRef = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;

struct Leaf {
  TensorRef tensor;
  int64_t version;
};

}  // namespace

struct od_leaves {
  // Visits each node once. The search ends at nodes from before the part, which may belong to a leaf, as the cast of a
  // weight does.
  void see(const std::shared_ptr<Node>& from) {
    std::vector<std::shared_ptr<Node>> next{from};
    while (!next.empty()) {
      auto node = std::move(next.back());
      next.pop_back();
      if (!seen.insert(node).second) continue;
      bool is_before = node->sequence_nr() < begun;
      for (const auto& edge : node->next_edges()) {
        if (edge.function == nullptr) continue;
        if (auto* leaf = dynamic_cast<AccumulateGrad*>(edge.function.get()))
          note(leaf->variable);
        else if (!is_before)
          next.push_back(edge.function);
      }
    }
  }

  void note(const at::Tensor& tensor) {
    if (noted.insert(tensor.unsafeGetTensorImpl()).second)
      leaves.push_back({TensorRef(tensor.getIntrusivePtr()), tensor._version()});
  }

  const uint64_t begun = at::sequence_number::peek();
  mutable std::mutex mutex;
  std::vector<Leaf> leaves;
  std::unordered_set<c10::TensorImpl*> noted;
  // Nodes are held until the part is over, so that no other node gets the address of one. Held longer, they would keep
  // the graph alive.
  std::unordered_set<std::shared_ptr<Node>> seen;
};

od_status od_leaves_new(od_leaves** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { *out = new od_leaves(); });
}

od_status od_leaves_see(od_leaves* leaves, const at::Tensor* tensor, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto node = tensor->grad_fn();
    if (node == nullptr) return;
    std::lock_guard<std::mutex> lock(leaves->mutex);
    leaves->see(node);
  });
}

void od_leaves_finish(od_leaves* leaves) noexcept {
  std::unordered_set<std::shared_ptr<Node>> seen;  // destroyed without the lock
  std::lock_guard<std::mutex> lock(leaves->mutex);
  seen.swap(leaves->seen);
}

od_status od_leaves_changed(const od_leaves* leaves, at::Tensor** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    std::lock_guard<std::mutex> lock(leaves->mutex);
    *out = nullptr;
    for (const auto& leaf : leaves->leaves) {
      auto tensor = leaf.tensor.lock();
      if (!tensor) continue;
      auto found = at::Tensor(std::move(tensor));
      if (found._version() == leaf.version) continue;
      *out = new at::Tensor(std::move(found));
      return;
    }
  });
}

void od_leaves_free(od_leaves* leaves) noexcept { delete leaves; }
