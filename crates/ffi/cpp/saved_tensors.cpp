// Hooks of the tensors that autograd saves for backward passes, without Python. libtorch asks its engine for them.
#include "saved_tensors.h"

#include <algorithm>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include <ATen/SequenceNumber.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/saved_variable.h>
#include <torch/csrc/autograd/saved_variable_hooks.h>

#include "backward_passes.h"
#include "callback_error.h"
#include "guarded.h"
#include "owned.h"
#include "storage.h"

namespace {

using overdrive::Owned;
using overdrive::throw_failed;
using torch::autograd::SavedVariable;
using torch::autograd::SavedVariableHooks;

struct Hooks {
  explicit Hooks(const od_saved_hooks& given) : owner(given.owner, given.drop), calls(given) {}
  Owned owner;
  od_saved_hooks calls;
};

struct Pushed {
  uint64_t number;
  std::shared_ptr<Hooks> hooks;
};

thread_local std::vector<Pushed> pushed;
thread_local uint64_t pushes = 0;
// Set while a tensor is saved without an operator that saves it.
thread_local bool is_apart = false;

std::string about(const at::Tensor& tensor) {
  if (!tensor.defined()) return "an undefined tensor";
  return c10::str(tensor.scalar_type(), " ", tensor.sizes(), " on ", tensor.device());
}

// One saved tensor.
class Packed final : public SavedVariableHooks {
 public:
  explicit Packed(std::shared_ptr<Hooks> hooks) : hooks_(std::move(hooks)) {}
  ~Packed() override {
    if (packed_ != nullptr) hooks_->calls.drop_packed(packed_);
  }

  void call_pack_hook(const at::Tensor& tensor) override {
    if (hooks_ == nullptr) return keep(tensor);
    od_error error{nullptr, nullptr};
    void* panic = nullptr;
    od_status status = hooks_->calls.pack(hooks_->owner.get(), &tensor, &packed_, &panic, &error);
    if (status != OD_OK) throw_failed(status, panic, hooks_->calls.drop_panic, error);
    if (packed_ == nullptr) return keep(tensor);
    sizes_ = c10::DimVector(tensor.sizes());
    type_ = tensor.scalar_type();
    device_ = tensor.device();
    version_ = tensor._version();
    if (overdrive::has_storage(tensor)) storage_ = tensor.storage().getWeakStorageImpl();
  }

  at::Tensor call_unpack_hook() override {
    if (packed_ == nullptr) return kept();
    at::Tensor* out = nullptr;
    od_error error{nullptr, nullptr};
    void* panic = nullptr;
    od_status status = hooks_->calls.unpack(packed_, &out, &panic, &error);
    if (status != OD_OK) throw_failed(status, panic, hooks_->calls.drop_panic, error);
    auto tensor = *std::unique_ptr<at::Tensor>(out);
    // Otherwise libtorch would compute with a tensor of another shape, which may broadcast.
    TORCH_CHECK(tensor.defined() && tensor.sizes() == sizes_ && tensor.scalar_type() == type_ &&
                    tensor.device() == device_,
                "a hook of saved tensors has unpacked ", about(tensor), ", where ", type_, " ", at::IntArrayRef(sizes_),
                " on ", device_, " was saved");
    // A hook that keeps the tensor's own memory leaves this check to us, as libtorch leaves it to hooks.
    bool is_same = overdrive::has_storage(tensor) && storage_._unsafe_get_target() == &overdrive::storage_of(tensor);
    TORCH_CHECK(!is_same || tensor._version() <= version_,
                "one of the variables needed for gradient computation has been modified by an inplace operation: a hook "
                "of saved tensors has kept the memory of ", type_, " ", at::IntArrayRef(sizes_), ", which is at version ",
                tensor._version(), "; expected version ", version_, " instead.");
    return tensor;
  }

  std::optional<std::pair<c10::SafePyObject, c10::SafePyObject>> retrieve_unpack_hook_data() const override {
    return std::nullopt;
  }

 private:
  // Keeps the tensor as libtorch does without hooks. If it has a history, it is kept without it: it may be the output
  // of the node that saves it, which would then keep itself alive.
  void keep(const at::Tensor& tensor) {
    kept_ = tensor.is_leaf() ? tensor : tensor.tensor_data();
    version_ = tensor._version();
  }

  // libtorch leaves the check of the version to hooks.
  at::Tensor kept() const {
    TORCH_CHECK(kept_._version() == version_,
                "one of the variables needed for gradient computation has been modified by an inplace operation: [",
                kept_.toString(), " ", kept_.sizes(), "] is at version ", kept_._version(), "; expected version ",
                version_, " instead.");
    return kept_;
  }

  std::shared_ptr<Hooks> hooks_;
  void* packed_ = nullptr;
  // What was saved, if it was packed.
  c10::DimVector sizes_;
  at::ScalarType type_ = at::ScalarType::Undefined;
  at::Device device_ = at::kCPU;
  c10::weak_intrusive_ptr<c10::StorageImpl> storage_{c10::intrusive_ptr<c10::StorageImpl>()};
  // What was saved, if it was not packed.
  at::Tensor kept_;
  int64_t version_ = 0;
};

}  // namespace

namespace overdrive {

std::unique_ptr<SavedVariableHooks> hooks_of_this_thread() {
  return pushed.empty() ? nullptr : std::make_unique<Packed>(pushed.back().hooks);
}

}  // namespace overdrive

struct od_saved_tensor {
  static SavedVariable saved(const at::Tensor& tensor) {
    struct Apart {
      Apart() { is_apart = true; }
      ~Apart() { is_apart = false; }
    } apart;
    return SavedVariable(tensor, /*is_output=*/false);
  }
  explicit od_saved_tensor(const at::Tensor& tensor) : variable(saved(tensor)) {
    // libtorch would keep the tensor itself, and with it the history that it gets when it is changed in place, which
    // may keep this one.
    if (pushed.empty() && tensor.defined() && !tensor.is_leaf())
      variable.register_hooks(std::make_unique<Packed>(nullptr));
  }
  SavedVariable variable;
};

od_status od_saved_hooks_push(const od_saved_hooks* hooks, uint64_t* number, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto made = std::make_shared<Hooks>(*hooks);
    TORCH_CHECK(overdrive::has_own_engine(),
                "hooks of saved tensors need this crate's autograd engine, but the process has another one, such as Python's");
    pushed.push_back({++pushes, std::move(made)});
    *number = pushes;
  });
}

void od_saved_hooks_pop(uint64_t number) noexcept {
  auto is_it = [&](const Pushed& one) { return one.number == number; };
  auto found = std::find_if(pushed.rbegin(), pushed.rend(), is_it);
  if (found == pushed.rend()) return;
  auto hooks = std::move(found->hooks);  // dropping them runs Rust code, which may push others
  pushed.erase(std::next(found).base());
}

od_status od_saved_tensor_new(const at::Tensor* tensor, od_saved_tensor** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { *out = new od_saved_tensor(*tensor); });
}

od_status od_saved_tensor_unpack(const od_saved_tensor* saved, at::Tensor** out, void** panic, od_error* err) noexcept {
  return overdrive::guarded_callback(err, panic, [&] { *out = new at::Tensor(saved->variable.unpack()); });
}

void od_saved_tensor_free(od_saved_tensor* saved) noexcept { delete saved; }

int64_t od_backward_pass() noexcept { return torch::autograd::get_current_graph_task_id(); }

od_status od_keep_for_pass(void* owner, void (*drop)(void*), od_error* err) noexcept {
  Owned owned(owner, drop);
  return overdrive::guarded(err, [&] {
    auto kept = std::make_shared<Owned>(std::move(owned));
    // At the end of a pass the engine drops its callbacks, whether it has called them or not.
    if (overdrive::within_pass()) torch::autograd::Engine::get_default_engine().queue_callback([kept] {});
  });
}

od_status od_tensor_data(const at::Tensor* tensor, at::Tensor** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { *out = new at::Tensor(tensor->tensor_data()); });
}

int32_t od_tensor_is_parameter(const at::Tensor* tensor) noexcept try {
  auto is_parameter = [](const at::TensorBase& it) {
    if (it.is_leaf()) return it.requires_grad();
    // The cast of a parameter, or of a view of it, that autocast keeps until its region ends.
    static const auto* views = new std::unordered_set<std::string>{
        "TBackward0", "TransposeBackward0", "ViewBackward0", "PermuteBackward0", "UnsqueezeBackward0", "SliceBackward0"};
    auto node = it.grad_fn();
    if (node->name() != "ToCopyBackward0") return false;
    do node = node->num_outputs() == 1 ? node->next_edge(0).function : nullptr;
    while (node != nullptr && views->count(node->name()) != 0);
    return dynamic_cast<torch::autograd::AccumulateGrad*>(node.get()) != nullptr;
  };
  return is_parameter(*tensor) || (tensor->is_view() && is_parameter(tensor->_base()));
} catch (...) {
  // libtorch cannot give the history of some views that were changed in place.
  return 0;
}

int32_t od_tensor_is_relu_saving(const at::Tensor* tensor) noexcept {
  // Other operators make their own node before they save the tensor.
  const auto& node = tensor->grad_fn();
  return node != nullptr && !is_apart && node->thread_id() == at::RecordFunction::currentThreadId() &&
         node->sequence_nr() + 1 == at::sequence_number::peek() && node->name() == "ReluBackward0";
}

// The weak reference keeps another storage from getting the address.
struct od_same_tensor {
  explicit od_same_tensor(const at::Tensor& tensor)
      : storage(tensor.storage().getWeakStorageImpl()), offset(tensor.storage_offset()), sizes(tensor.sizes()),
        strides(tensor.strides()), type(tensor.scalar_type()), version(tensor._version()),
        is_conj(tensor.is_conj()), is_neg(tensor.is_neg()) {}
  c10::weak_intrusive_ptr<c10::StorageImpl> storage;
  int64_t offset;
  c10::DimVector sizes, strides;
  at::ScalarType type;
  int64_t version;
  bool is_conj, is_neg;
};

od_status od_same_tensor_new(const at::Tensor* tensor, od_same_tensor** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    TORCH_CHECK(overdrive::has_storage(*tensor), "a tensor without strides has no memory of its own");
    *out = new od_same_tensor(*tensor);
  });
}

int32_t od_same_tensor_is(const od_same_tensor* same, const at::Tensor* tensor) noexcept {
  if (!overdrive::has_storage(*tensor)) return 0;
  bool is_there = same->storage._unsafe_get_target() == &overdrive::storage_of(*tensor);
  return is_there && same->offset == tensor->storage_offset() && tensor->sizes() == same->sizes &&
         tensor->strides() == same->strides && tensor->scalar_type() == same->type && tensor->_version() == same->version &&
         tensor->is_conj() == same->is_conj && tensor->is_neg() == same->is_neg;
}

void od_same_tensor_free(od_same_tensor* same) noexcept { delete same; }

od_status od_tensor_set_version(const at::Tensor* tensor, int64_t version, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    TORCH_CHECK(tensor->defined() && !tensor->is_inference(), "a tensor without a version is given");
    tensor->unsafeGetTensorImpl()->set_version_counter(c10::VariableVersion(static_cast<uint32_t>(version)));
  });
}

int64_t od_tensor_version(const at::Tensor* tensor) noexcept {
  bool has_version = tensor->defined() && !tensor->is_inference();
  return has_version ? tensor->_version() : 0;
}
