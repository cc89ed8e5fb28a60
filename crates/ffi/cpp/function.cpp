// Functions whose backward pass is written in Rust, and gradients of chosen tensors.
#include <algorithm>
#include <mutex>
#include <unordered_set>
#include <vector>

#include <ATen/Functions.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/basic_ops.h>
#include <torch/csrc/autograd/functions/utils.h>
#include <torch/csrc/autograd/saved_variable.h>

#include "callback_error.h"
#include "guarded.h"
#include "owned.h"

namespace {

using overdrive::Owned;
using torch::autograd::AutoGradMode;
using torch::autograd::edge_list;
using torch::autograd::GradMode;
using torch::autograd::Node;
using torch::autograd::SavedVariable;
using torch::autograd::variable_list;
using torch::autograd::VariableInfo;

std::unique_ptr<od_tensor_list> list_of(const variable_list& tensors) {
  auto list = std::make_unique<od_tensor_list>();
  list->list.reserve(tensors.size());
  for (const auto& tensor : tensors) list->list.push_back(tensor);
  return list;
}

bool any_requires_grad(const variable_list& tensors) {
  return std::any_of(tensors.begin(), tensors.end(),
                     [](const at::Tensor& tensor) { return tensor.defined() && tensor.requires_grad(); });
}

std::unordered_set<at::TensorImpl*> identities(const od_tensor_list* list) {
  std::unordered_set<at::TensorImpl*> out;
  for (const at::Tensor& tensor : list->list) out.insert(tensor.unsafeGetTensorImpl());
  return out;
}

// A node of the graph that calls Rust.
class RustNode final : public Node {
 public:
  RustNode(Owned owned, const od_function& function, const variable_list& inputs)
      : owned_(std::move(owned)),
        name_(std::string(function.name) + "Backward"),
        materialize_grads_(function.materialize_grads != 0),
        once_differentiable_(function.once_differentiable != 0),
        backward_(function.backward),
        drop_panic_(function.drop_panic) {
    for (const auto& input : inputs) is_given_.push_back(input.defined());
  }

  std::string name() const override { return name_; }

  // Called after the outputs have got their history, so that a saved output has no reference to this node.
  void save(const variable_list& tensors, const std::vector<std::optional<at::Tensor>>& outputs) {
    for (const auto& output : outputs) outputs_.push_back(output ? VariableInfo(*output) : VariableInfo());
    auto saved = std::make_shared<std::vector<SavedVariable>>();
    for (const auto& tensor : tensors) saved->emplace_back(tensor, tensor.defined() && tensor.grad_fn().get() == this);
    saved_ = std::move(saved);
  }

  variable_list saved() {
    auto kept = saved_variables();
    TORCH_CHECK(kept != nullptr, torch::autograd::ERR_BACKWARD_TWICE);
    variable_list out;
    for (const auto& variable : *kept) out.push_back(variable.unpack(getptr()));
    return out;
  }

  void release_variables() override {
    std::shared_ptr<const std::vector<SavedVariable>> released;  // destroyed without the lock
    std::lock_guard<std::mutex> lock(mutex_);
    released.swap(saved_);
  }

  variable_list apply(variable_list&& grads) override {
    bool differentiates_again = once_differentiable_ && GradMode::is_enabled() && any_requires_grad(grads);
    at::OptionalDeviceGuard device_guard;
    for (size_t i = 0; i < grads.size(); ++i)
      if (materialize_grads_ && !grads[i].defined()) grads[i] = outputs_[i].zeros(device_guard);
    auto given = list_of(grads);
    grads.clear();
    variable_list results;
    {
      AutoGradMode mode(GradMode::is_enabled() && !once_differentiable_);
      results = call(std::move(given));
    }
    check(results);
    return differentiates_again ? refuse_second(std::move(results)) : results;
  }

 private:
  std::shared_ptr<const std::vector<SavedVariable>> saved_variables() {
    std::lock_guard<std::mutex> lock(mutex_);
    return saved_;
  }

  variable_list call(std::unique_ptr<od_tensor_list> grads) {
    od_tensor_list* out = nullptr;
    od_error error{nullptr, nullptr};
    void* panic = nullptr;
    od_status status = backward_(owned_.get(), reinterpret_cast<od_node*>(this), grads.release(), &out, &panic, &error);
    if (status == OD_OK) return std::unique_ptr<od_tensor_list>(out)->list.vec();
    overdrive::throw_failed(status, panic, drop_panic_, error);
  }

  // There are as many gradients as inputs. The engine checks their shapes and devices.
  void check(variable_list& results) const {
    size_t inputs = is_given_.size();
    while (results.size() > inputs && !results.back().defined()) results.pop_back();
    TORCH_CHECK(results.size() == inputs, "function ", name_, " returned an incorrect number of gradients (expected ",
                inputs, ", got ", results.size(), ")");
    for (size_t i = 0; i < inputs; ++i)
      TORCH_CHECK(is_given_[i] || !results[i].defined(), "function ", name_,
                  " returned a gradient different than None at position ", i + 1,
                  ", but the corresponding forward input was not a Variable");
  }

  // The gradients cannot be differentiated.
  static variable_list refuse_second(variable_list results) {
    for (auto& result : results)
      if (result.defined()) result = result.detach().set_requires_grad(true);
    size_t count = results.size();
    torch::autograd::DelayedError refuse(
        "trying to differentiate twice a function that was marked with @once_differentiable",
        static_cast<int64_t>(count));
    return refuse.apply(std::move(results));
  }

  Owned owned_;
  std::string name_;
  bool materialize_grads_, once_differentiable_;
  decltype(od_function::backward) backward_;
  decltype(od_function::drop_panic) drop_panic_;
  std::vector<bool> is_given_;
  std::vector<VariableInfo> outputs_;
  // Null once the saved tensors are freed.
  std::shared_ptr<const std::vector<SavedVariable>> saved_;
};

RustNode& node_of(const od_node* node) {
  return *const_cast<RustNode*>(reinterpret_cast<const RustNode*>(node));
}

// The gradients that a pass begins with, by the rules of torch.autograd.grad.
variable_list first_grads(const variable_list& outputs, variable_list grads) {
  grads.resize(grads.empty() ? outputs.size() : grads.size());
  TORCH_CHECK(outputs.size() == grads.size(), "got ", outputs.size(), " tensors and ", grads.size(), " gradients");
  auto dtype = [](const at::Tensor& tensor) { return "torch." + c10::getDtypeNames(tensor.scalar_type()).first; };
  for (size_t i = 0; i < outputs.size(); ++i) {
    const auto& output = outputs[i];
    auto& grad = grads[i];
    if (grad.defined()) {
      auto size = [](const at::Tensor& tensor) { return c10::str("torch.Size(", tensor.sizes(), ")"); };
      TORCH_CHECK(grad.sizes() == output.sizes(), "Mismatch in shape: grad_output[", i, "] has a shape of ", size(grad),
                  " and output[", i, "] has a shape of ", size(output), ".");
      TORCH_CHECK(grad.is_complex() == output.is_complex(),
                  "For complex Tensors, both grad_output and output are required to have the same dtype. Mismatch in "
                  "dtype: grad_output[",
                  i, "] has a dtype of ", dtype(grad), " and output[", i, "] has a dtype of ", dtype(output), ".");
    } else if (output.requires_grad()) {
      TORCH_CHECK(output.numel() == 1, "grad can be implicitly created only for scalar outputs");
      TORCH_CHECK(output.is_floating_point(), "grad can be implicitly created only for real scalar outputs but got ",
                  dtype(output));
      grad = at::ones_like(output, at::MemoryFormat::Preserve);
    }
  }
  return grads;
}

edge_list roots_of(const variable_list& outputs) {
  edge_list roots;
  for (size_t i = 0; i < outputs.size(); ++i) {
    auto edge = torch::autograd::impl::gradient_edge(outputs[i]);
    TORCH_CHECK(edge.function != nullptr, "element ", i,
                " of tensors does not require grad and does not have a grad_fn");
    roots.push_back(std::move(edge));
  }
  return roots;
}

edge_list edges_of(const variable_list& inputs) {
  edge_list edges;
  for (const auto& input : inputs) {
    TORCH_CHECK(input.requires_grad(), "One of the differentiated Tensors does not require grad");
    auto node = input.grad_fn();
    if (node == nullptr) node = torch::autograd::impl::try_get_grad_accumulator(input);
    // A leaf without an accumulator is in no graph. With an edge to nowhere, the engine would run nodes that lead to
    // nothing.
    if (node == nullptr) node = std::make_shared<torch::autograd::Identity>();
    edges.emplace_back(std::move(node), input.output_nr());
  }
  return edges;
}

variable_list defined(const od_tensor_list* list, const char* what, bool may_be_empty) {
  auto tensors = list->list.vec();
  TORCH_CHECK(may_be_empty || !tensors.empty(), "grad requires non-empty ", what, ".");
  for (const auto& tensor : tensors) TORCH_CHECK(tensor.defined(), "one of the ", what, " is an undefined tensor");
  return tensors;
}

}  // namespace

od_status od_function_record(const od_function* function, od_tensor_list** out, od_error* err) noexcept {
  Owned owned(function->owner, function->drop);
  return overdrive::guarded(err, [&] {
    auto inputs = function->inputs->list.vec();
    std::shared_ptr<RustNode> node;
    if (GradMode::is_enabled() && any_requires_grad(inputs)) {
      node = std::shared_ptr<RustNode>(new RustNode(std::move(owned), *function, inputs), torch::autograd::deleteNode);
      node->set_next_edges(torch::autograd::collect_next_edges(inputs));
    }
    auto dirty = identities(function->dirty);
    for (auto* tensor : dirty) tensor->bump_version();
    std::vector<std::optional<at::Tensor>> outputs;
    for (const at::Tensor& output : function->outputs->list)
      outputs.push_back(output.defined() ? std::make_optional(output) : std::nullopt);
    auto no_forward_mode = [](const variable_list&, const variable_list&) -> variable_list {
      TORCH_CHECK(false, "functions have no forward-mode derivative");
    };
    auto view_of = [](const at::Tensor& tensor) { return tensor.view_as(tensor); };
    auto wrapped =
        torch::autograd::_wrap_outputs(inputs, identities(function->non_differentiable), dirty, outputs, node,
                                       no_forward_mode, {}, view_of, /*pure_view=*/false);
    if (node != nullptr) node->save(function->saved->list.vec(), wrapped);
    variable_list results;
    for (auto& output : wrapped) results.push_back(output.value_or(at::Tensor()));
    *out = list_of(results).release();
  });
}

od_status od_node_saved(const od_node* node, od_tensor_list** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { *out = list_of(node_of(node).saved()).release(); });
}

od_status od_node_needs_input_grad(const od_node* node, size_t index, int32_t* out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto& function = node_of(node);
    *out = index < function.num_outputs() && function.task_should_compute_output(index);
  });
}

od_status od_grad(const od_tensor_list* outputs, const od_tensor_list* inputs, const od_tensor_list* grad_outputs,
                  const od_grad_options* options, od_tensor_list** out, void** panic, od_error* err) noexcept {
  return overdrive::guarded_callback(err, panic, [&] {
    bool accumulate = options->accumulate != 0;
    auto of = defined(outputs, "outputs", false), by = defined(inputs, "inputs", accumulate);
    auto grads = first_grads(of, grad_outputs->list.vec());
    // The roots come first: they make the accumulator of an output that is a leaf, which the edges look for.
    auto roots = roots_of(of);
    auto edges = edges_of(by);
    auto results = torch::autograd::Engine::get_default_engine().execute(
        roots, grads, options->retain_graph != 0, options->create_graph != 0, accumulate, edges);
    TORCH_CHECK(accumulate || options->allow_unused != 0 ||
                    std::all_of(results.begin(), results.end(), [](const auto& grad) { return grad.defined(); }),
                "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True "
                "if this is the desired behavior.");
    *out = list_of(results).release();
  });
}
