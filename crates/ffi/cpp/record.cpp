// Records the operators that a thread runs, below autograd and autocast: the forward pass, the backward pass and
// updates in place, as one list without branches. The operators also run as usual.
//
// They are intercepted by the dispatch key `Fake`, which belongs to no backend. It is on for a thread while it records
// or keeps results (keep.cpp), and for its backward passes.
#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include <ATen/ATen.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/library.h>

#include "guarded.h"
#include "keep.h"
#include "owned.h"
#include "record.h"
#include "record_operators.h"
#include "storage.h"

namespace {

using overdrive::has_storage;
using overdrive::is_one_of;
using overdrive::leaves_uninitialised;
using overdrive::makes_host_data;
using overdrive::overwrites;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;
using TensorRef = c10::weak_intrusive_ptr<at::TensorImpl, at::UndefinedTensorImpl>;
using StorageRef = c10::weak_intrusive_ptr<at::StorageImpl>;

// A tensor's part of its memory. By it a tensor is found for which autograd has made a new object, to save it.
struct View {
  explicit View(const at::Tensor& tensor, int64_t number)
      : number(number), offset(tensor.storage_offset()), sizes(tensor.sizes()), strides(tensor.strides()),
        type(tensor.scalar_type()), is_conj(tensor.is_conj()), is_neg(tensor.is_neg()) {}

  bool is_of(const at::Tensor& tensor) const {
    return offset == tensor.storage_offset() && tensor.sizes() == sizes && tensor.strides() == strides &&
           type == tensor.scalar_type() && is_conj == tensor.is_conj() && is_neg == tensor.is_neg();
  }

  int64_t number, offset;
  c10::DimVector sizes, strides;
  at::ScalarType type;
  bool is_conj, is_neg;
};

// A memory. Only its address is held, not its data, so that no later object can have the same address.
struct Storage {
  StorageRef held;
  std::string made_by{};  // the operator that allocated it for the host to fill; empty after another operator's write
  bool written = false;
  bool noticed = false;  // by an operator whose schema says so: a write that counts in `Tensor._version`
  std::vector<View> views{};
};

// Escapes quotes and backslashes only, because the texts of operators have no control characters.
void append_quoted(std::string& text, const std::string& word) {
  text += '"';
  for (char c : word) {
    if (c == '"' || c == '\\') text += '\\';
    text += c;
  }
  text += '"';
}

void append_number(std::string& text, double number) {
  if (std::isnan(number)) {
    text += R"({"float":"nan"})";
  } else if (std::isinf(number)) {
    text += number > 0 ? R"({"float":"inf"})" : R"({"float":"-inf"})";
  } else {
    size_t before = text.size();
    char buffer[40];
    std::snprintf(buffer, sizeof buffer, "%.17g", number);
    text += buffer;
    if (text.find_first_of(".e", before) == std::string::npos) text += ".0";
  }
}

}  // namespace

struct od_recorder {
  od_recorder(overdrive::Owned owned, void (*on_operator)(void*), void (*on_refusal)(void*, const char*))
      : owned(std::move(owned)), on_operator(on_operator), on_refusal(on_refusal) {}

  // The number of a tensor. One that no recorded operator has made becomes external.
  int64_t number_of(const at::Tensor& tensor) {
    auto found = numbers.find(tensor.unsafeGetTensorImpl());
    if (found != numbers.end()) return found->second;
    if (has_storage(tensor)) {
      for (const auto& view : storage_of(tensor).views)
        if (view.is_of(tensor)) return remember(tensor, view.number);
    }
    return add_external(tensor);
  }

  // Adds an external tensor. Only this object has the number, not another one with the same memory (from `detach`,
  // say), as that one may get a gradient, or stay when the batch changes.
  int64_t add_external(const at::Tensor& tensor) {
    externals.push_back(tensor);
    return hold(tensor, next++);
  }

  int64_t remember(const at::Tensor& tensor, int64_t number) {
    if (has_storage(tensor)) storage_of(tensor).views.emplace_back(tensor, number);
    return hold(tensor, number);
  }

  int64_t hold(const at::Tensor& tensor, int64_t number) {
    numbers[tensor.unsafeGetTensorImpl()] = number;
    held.emplace_back(tensor.getIntrusivePtr());
    return number;
  }

  Storage& storage_of(const at::Tensor& tensor) {
    auto* memory = &overdrive::storage_of(tensor);
    auto found = storages.find(memory);
    if (found != storages.end()) return found->second;
    return storages.emplace(memory, Storage{StorageRef(tensor.storage().getWeakStorageImpl())}).first->second;
  }

  void refuse(const std::string& why) { on_refusal(owned.get(), why.c_str()); }

  void append_tensor(std::string& text, const at::Tensor& tensor) {
    if (!tensor.defined()) {
      text += "null";
      return;
    }
    text += "{\"tensor\":" + std::to_string(number_of(tensor)) + "}";
  }

  void append_value(std::string& text, const IValue& value, const c10::TypePtr& declared, const std::string& op) {
    auto type = declared;
    if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
    if (value.isNone()) {
      text += "null";
    } else if (value.isTensor()) {
      append_tensor(text, value.toTensor());
    } else if (value.isBool()) {
      text += value.toBool() ? "true" : "false";
    } else if (value.isInt() && type->kind() == c10::TypeKind::ScalarTypeType) {
      text += std::string("{\"dtype\":\"") + c10::toString(static_cast<at::ScalarType>(value.toInt())) + "\"}";
    } else if (value.isInt() && type->kind() == c10::TypeKind::LayoutType) {
      text += "{\"layout\":" + std::to_string(value.toInt()) + "}";
    } else if (value.isInt() && type->kind() == c10::TypeKind::MemoryFormatType) {
      text += "{\"memory_format\":" + std::to_string(value.toInt()) + "}";
    } else if (value.isInt()) {
      text += std::to_string(value.toInt());
    } else if (value.isSymInt()) {
      text += std::to_string(value.toSymInt().guard_int(__FILE__, __LINE__));
    } else if (value.isDouble()) {
      append_number(text, value.toDouble());
    } else if (value.isSymFloat()) {
      append_number(text, value.toSymFloat().guard_float(__FILE__, __LINE__));
    } else if (value.isDevice()) {
      text += "{\"device\":\"" + value.toDevice().str() + "\"}";
    } else if (value.isString()) {
      append_quoted(text, value.toStringRef());
    } else if (value.isList()) {
      auto element = type->cast<c10::ListType>();
      text += '[';
      bool first = true;
      for (const IValue& item : value.toListRef()) {
        if (!std::exchange(first, false)) text += ',';
        append_value(text, item, element ? element->getElementType() : type, op);
      }
      text += ']';
    } else {
      refuse(op + " takes a " + value.tagKind() + ", which cannot be written down");
      text += "null";
    }
  }

  template <typename Visit>
  static void each_tensor(const IValue& value, Visit&& visit) {
    if (value.isTensor() && value.toTensor().defined()) visit(value.toTensor());
    if (value.isTensorList() || value.isList())
      for (const IValue& item : value.toListRef()) each_tensor(item, visit);
  }

  // Called before the operator runs, because it may change its arguments.
  void before(const OperatorHandle& op, const Stack& stack, size_t count, std::string& text) {
    on_operator(owned.get());
    const auto& schema = op.schema();
    const auto name = schema.name();
    auto full = schema.overload_name().empty() ? name : name + "." + schema.overload_name();
    if (op.hasTag(at::Tag::data_dependent_output)) refuse(full + " reads the values of a tensor");
    if (op.hasTag(at::Tag::nondeterministic_seeded) && overdrive::generator_sets() != sets)
      refuse(full + " draws after the state of a generator was set");
    if (op.hasTag(at::Tag::dynamic_output_shape)) refuse(full + " returns a shape that depends on values");
    if (name.rfind("aten::", 0) != 0 && name.rfind("prims::", 0) != 0) refuse(full + " is not an operator of ATen");
    if (is_one_of(name, {"aten::set_", "aten::resize_", "aten::resize_as_"}))
      refuse(full + " replaces the memory of a tensor");
    text += "{\"op\":";
    append_quoted(text, name);
    text += ",\"overload\":";
    append_quoted(text, schema.overload_name());
    text += ",\"args\":[";
    const auto* arguments = stack.data() + (stack.size() - count);
    for (size_t i = 0; i < count; ++i) {
      const auto& argument = schema.arguments()[i];
      if (i > 0) text += ',';
      append_value(text, arguments[i], argument.real_type(), full);
      bool written = overdrive::is_written(argument) || overdrive::writes_unsaid(name, i);
      each_tensor(arguments[i], [&](const at::Tensor& tensor) {
        if (!has_storage(tensor)) return;
        auto& storage = storage_of(tensor);
        bool replaced = written && (overwrites(op) || argument.is_out());
        if (!storage.made_by.empty() && !replaced && tensor.numel() > 0)
          refuse(full + " reads a tensor that the host has filled within the step");
        if (written) {
          storage.made_by.clear();
          storage.written = true;
          storage.noticed |= overdrive::is_written(argument);
        }
      });
    }
    text += ']';
  }

  void after(const OperatorHandle& op, const Stack& stack, std::string& text) {
    const auto& name = op.schema().name();
    bool uninitialised = leaves_uninitialised(name) || (name == "aten::zeros" && makes_host_data());
    size_t count = op.schema().returns().size();
    text += ",\"out\":[";
    const auto* results = stack.data() + (stack.size() - count);
    for (size_t i = 0; i < count; ++i) {
      if (i > 0) text += ',';
      append_result(text, results[i], uninitialised ? name : "");
    }
    text += "]}";
    if (!nodes.empty()) nodes += ",\n";
    nodes += text;
  }

  void append_result(std::string& text, const IValue& value, const std::string& uninitialised_by) {
    if (value.isTensor()) {
      const auto& tensor = value.toTensor();
      if (!tensor.defined()) {
        text += "null";
        return;
      }
      auto found = numbers.find(tensor.unsafeGetTensorImpl());
      int64_t number = found != numbers.end() ? found->second : remember(tensor, next++);
      if (has_storage(tensor)) {
        auto& storage = storage_of(tensor);
        if (!uninitialised_by.empty()) storage.made_by = uninitialised_by;
      }
      text += std::to_string(number);
    } else if (value.isList()) {
      text += '[';
      bool first = true;
      for (const IValue& item : value.toListRef()) {
        if (!std::exchange(first, false)) text += ',';
        append_result(text, item, uninitialised_by);
      }
      text += ']';
    } else {
      text += "null";
    }
  }

  bool writes_to(const at::Tensor& tensor) { return has_storage(tensor) && storage_of(tensor).written; }

  // Refuses a write to external tensors that share memory: a compiled graph would not see that the other one changes.
  void check_shared_memory() {
    for (size_t a = 0; a < externals.size(); ++a) {
      if (!writes_to(externals[a])) continue;
      for (size_t b = 0; b < externals.size(); ++b) {
        if (b == a || !overdrive::share_memory(externals[a], externals[b])) continue;
        refuse("two tensors from outside the step share memory, and the step writes to it");
        return;
      }
    }
  }

  std::mutex mutex;
  std::unordered_map<at::TensorImpl*, int64_t> numbers;
  std::vector<TensorRef> held;
  std::unordered_map<at::StorageImpl*, Storage> storages;
  std::vector<at::Tensor> externals;
  int64_t next = 0;
  std::string nodes;
  overdrive::Owned owned;
  void (*on_operator)(void*);
  void (*on_refusal)(void*, const char*);
  const uint64_t sets = overdrive::generator_sets();
};

namespace {

std::atomic<od_recorder*> active{nullptr};

void record(const OperatorHandle& op, DispatchKeySet below, Stack* stack) {
  auto* recorder = active.load();
  if (recorder == nullptr) return op.redispatchBoxed(below, stack);
  std::string text;
  size_t count = op.schema().arguments().size();
  {
    std::lock_guard<std::mutex> lock(recorder->mutex);
    recorder->before(op, *stack, count, text);
  }
  op.redispatchBoxed(below, stack);
  std::lock_guard<std::mutex> lock(recorder->mutex);
  recorder->after(op, *stack, text);
}

// An operator that a kept result stands for does not run, so it is not recorded.
void intercept(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  c10::impl::ExcludeDispatchKeyGuard not_again(DispatchKey::Fake);
  auto below = keys & DispatchKeySet(DispatchKeySet::FULL_AFTER, DispatchKey::Fake);
  overdrive::run_or_reuse(op, *stack, [&] { record(op, below, stack); });
}

}  // namespace

TORCH_LIBRARY_IMPL(_, Fake, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&intercept>()); }

od_status od_record_start(void* owner, void (*on_operator)(void*), void (*on_refusal)(void*, const char*),
                          void (*drop)(void*), od_recorder** out, od_error* err) noexcept {
  overdrive::Owned owned(owner, drop);
  return overdrive::guarded(err, [&] {
    auto recorder = std::make_unique<od_recorder>(std::move(owned), on_operator, on_refusal);
    od_recorder* none = nullptr;
    *out = nullptr;
    if (!active.compare_exchange_strong(none, recorder.get())) return;
    // Casts of weights that an earlier step has left would be external, and never change again.
    at::autocast::clear_cache();
    c10::impl::tls_set_dispatch_key_included(DispatchKey::Fake, true);
    *out = recorder.release();
  });
}

void od_record_stop(od_recorder* recorder) noexcept {
  od_recorder* mine = recorder;
  if (!active.compare_exchange_strong(mine, nullptr)) return;
  c10::impl::tls_set_dispatch_key_included(DispatchKey::Fake, false);
}

void od_record_free(od_recorder* recorder) noexcept {
  od_record_stop(recorder);
  delete recorder;
}

od_status od_record_number(od_recorder* recorder, const at::Tensor* tensor, int64_t* out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    TORCH_CHECK(tensor->defined(), "an undefined tensor is no result of a step");
    std::lock_guard<std::mutex> lock(recorder->mutex);
    *out = recorder->number_of(*tensor);
  });
}

od_status od_record_add_input(od_recorder* recorder, const at::Tensor* tensor, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    TORCH_CHECK(tensor->defined(), "an undefined tensor is no input of a step");
    std::lock_guard<std::mutex> lock(recorder->mutex);
    recorder->add_external(*tensor);
  });
}

od_status od_record_writes_to(od_recorder* recorder, const at::Tensor* tensor, int32_t* out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    TORCH_CHECK(tensor->defined(), "an undefined tensor is not written to");
    std::lock_guard<std::mutex> lock(recorder->mutex);
    *out = recorder->writes_to(*tensor) ? OD_WRITTEN | (recorder->storage_of(*tensor).noticed ? OD_NOTICED : 0) : 0;
  });
}

od_status od_record_externals(od_recorder* recorder, od_tensor_list** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    std::lock_guard<std::mutex> lock(recorder->mutex);
    auto list = std::make_unique<od_tensor_list>();
    for (const auto& tensor : recorder->externals) list->list.push_back(tensor);
    *out = list.release();
  });
}

od_status od_record_operators(od_recorder* recorder, char** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    std::lock_guard<std::mutex> lock(recorder->mutex);
    recorder->check_shared_memory();
    *out = overdrive::copy_string(recorder->nodes.c_str());
    TORCH_CHECK(*out != nullptr, "no memory for the record of a step");
  });
}
