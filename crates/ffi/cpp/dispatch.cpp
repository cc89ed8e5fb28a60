// Calls any operator of libtorch by name through the boxed dispatcher. One entry point serves the foreach, fused and
// amp operators that tch leaves out; boxing costs well under a microsecond.
#include <algorithm>
#include <limits>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/jit_type.h>

#include "guarded.h"

namespace {

using c10::IValue;

const c10::OperatorHandle& handle(const od_op* op) { return *reinterpret_cast<const c10::OperatorHandle*>(op); }

IValue to_ivalue(const od_value& value) {
  switch (value.tag) {
    case OD_NONE: return IValue();
    case OD_BOOL: return IValue(value.integer != 0);
    case OD_INT: return IValue(value.integer);
    case OD_DOUBLE: return IValue(value.real);
    case OD_TENSOR: return IValue(*static_cast<const at::Tensor*>(value.pointer));
    case OD_TENSOR_LIST: return IValue(static_cast<const od_tensor_list*>(value.pointer)->list);
    case OD_INT_LIST: {
      const auto* data = static_cast<const int64_t*>(value.pointer);
      return IValue(c10::List<int64_t>(c10::ArrayRef<int64_t>(data, static_cast<size_t>(value.integer))));
    }
    case OD_SCALAR_LIST: {
      const auto* data = static_cast<const double*>(value.pointer);
      c10::impl::GenericList list(c10::NumberType::get());
      list.reserve(static_cast<size_t>(value.integer));
      for (int64_t i = 0; i < value.integer; ++i) list.push_back(IValue(data[i]));
      return IValue(std::move(list));
    }
    default: TORCH_CHECK(false, "unknown argument tag ", value.tag);
  }
}

od_value from_ivalue(const IValue& value) {
  od_value out{OD_NONE, 0, 0.0, nullptr};
  if (value.isNone()) return out;
  if (value.isBool()) {
    out.tag = OD_BOOL;
    out.integer = value.toBool();
  } else if (value.isInt()) {
    out.tag = OD_INT;
    out.integer = value.toInt();
  } else if (value.isDouble()) {
    out.tag = OD_DOUBLE;
    out.real = value.toDouble();
  } else if (value.isTensor()) {
    out.tag = OD_TENSOR;
    out.pointer = new at::Tensor(value.toTensor());
  } else if (value.isTensorList()) {
    out.tag = OD_TENSOR_LIST;
    out.pointer = new od_tensor_list{value.toTensorList()};
  } else {
    TORCH_CHECK(false, "operators that return a ", value.tagKind(), " are not supported");
  }
  return out;
}

void release(const od_value& value) {
  if (value.tag == OD_TENSOR) delete static_cast<const at::Tensor*>(value.pointer);
  if (value.tag == OD_TENSOR_LIST) delete static_cast<const od_tensor_list*>(value.pointer);
}

void check_defined(const IValue& value, const c10::Argument& argument) {
  bool defined = !value.isTensor() || value.toTensor().defined();
  if (value.isTensorList()) {
    auto items = value.toListRef();
    defined = std::all_of(items.begin(), items.end(), [](const IValue& item) { return item.toTensor().defined(); });
  }
  TORCH_CHECK(defined, argument.name(), " holds an undefined tensor");
}

// libtorch converts numbers to these enums without a check, and uses them as table indices.
void check_enumerated(const IValue& value, const c10::Argument& argument) {
  if (!value.isInt()) return;
  auto type = argument.real_type();
  if (auto optional = type->cast<c10::OptionalType>()) type = optional->getElementType();
  int64_t number = value.toInt(), count = std::numeric_limits<int64_t>::max();
  switch (type->kind()) {
    case c10::TypeKind::ScalarTypeType: count = static_cast<int64_t>(c10::ScalarType::NumOptions); break;
    case c10::TypeKind::LayoutType: count = static_cast<int64_t>(c10::Layout::NumOptions); break;
    case c10::TypeKind::MemoryFormatType: count = static_cast<int64_t>(c10::MemoryFormat::NumOptions); break;
    default: return;
  }
  constexpr auto kUndefined = static_cast<int64_t>(c10::ScalarType::Undefined);
  bool undefined = type->kind() == c10::TypeKind::ScalarTypeType && number == kUndefined;
  TORCH_CHECK(number >= 0 && number < count && !undefined, argument.name(), " is ", number, ", which is not a valid ",
              type->str());
}

// Whether a tensor is one float32 number on this device.
bool is_number(const at::Tensor& tensor, c10::Device device) {
  return tensor.layout() == at::kStrided && tensor.numel() == 1 && tensor.scalar_type() == at::kFloat &&
         tensor.device() == device;
}

bool is_alike(const at::Tensor& tensor, const at::Tensor& param) {
  return tensor.layout() == at::kStrided && tensor.device() == param.device() &&
         tensor.scalar_type() == param.scalar_type() && tensor.sizes() == param.sizes() &&
         tensor.strides() == param.strides();
}

// Whether the argument of this name is true, or not 0.
bool is_set(const std::vector<c10::Argument>& declared, const torch::jit::Stack& stack, const char* name) {
  for (size_t i = 0; i < stack.size(); ++i)
    if (declared[i].name() == name) return stack[i].isBool() ? stack[i].toBool() : stack[i].toDouble() != 0;
  return false;
}

// A fused optimizer accesses the memory of a parameter, its gradient and its state by one index, without a check.
void check_fused(const std::vector<c10::Argument>& declared, const torch::jit::Stack& stack) {
  TORCH_CHECK(stack[0].isTensorList(), declared[0].name(), " has to be a list of tensors");
  auto params = stack[0].toListRef();
  TORCH_CHECK(!params.empty(), "a fused optimizer needs at least one parameter");
  for (const auto& param : params) {
    const auto& tensor = param.toTensor();
    TORCH_CHECK(tensor.layout() == at::kStrided && tensor.is_non_overlapping_and_dense(),
                "a fused optimizer needs dense parameters without gaps");
  }
  auto device = params[0].toTensor().device();
  for (size_t i = 0; i < stack.size(); ++i) {
    const auto& name = declared[i].name();
    if (stack[i].isTensor()) {
      TORCH_CHECK(is_number(stack[i].toTensor(), device), name, " has to be one number of float32 on ", device);
    }
    if (!stack[i].isTensorList()) continue;
    auto items = stack[i].toListRef();
    if (items.empty() && ((name == "max_exp_avg_sqs" && !is_set(declared, stack, "amsgrad")) ||
                          (name == "momentum_buffer_list" && !is_set(declared, stack, "momentum"))))
      continue;
    TORCH_CHECK(items.size() == params.size(), name, " has ", items.size(), " tensors for ", params.size(),
                " parameters");
    for (size_t at = 0; at < items.size(); ++at) {
      const auto &tensor = items[at].toTensor(), &param = params[at].toTensor();
      bool fits = name == "state_steps" ? is_number(tensor, param.device()) : is_alike(tensor, param);
      TORCH_CHECK(fits, name, " does not fit parameter ", at, ", a ", param.scalar_type(), " of size ", param.sizes(),
                  " and strides ", param.strides(), " on ", param.device());
    }
  }
}

}  // namespace

od_status od_op_find(const char* name, const char* overload, const od_op** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto found = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    // Operators stay registered for the life of the process, so this handle is never freed.
    *out = reinterpret_cast<const od_op*>(new c10::OperatorHandle(found));
  });
}

od_status od_op_call(const od_op* op, int32_t fused, const od_value* args, size_t n_args, od_value* results,
                     size_t max_results, size_t* n_results, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    const auto& schema = handle(op).schema();
    const auto& declared = schema.arguments();
    TORCH_CHECK(n_args <= declared.size(), schema.operator_name(), " takes at most ", declared.size(),
                " arguments, got ", n_args);
    TORCH_CHECK(schema.returns().size() <= max_results, schema.operator_name(), " returns ", schema.returns().size(),
                " values, more than the ", max_results, " there is room for");
    torch::jit::Stack stack;
    stack.reserve(declared.size());
    for (size_t i = 0; i < n_args; ++i) stack.push_back(to_ivalue(args[i]));
    for (size_t i = n_args; i < declared.size(); ++i) {
      const auto& fallback = declared[i].default_value();
      TORCH_CHECK(fallback.has_value(), schema.operator_name(), " needs argument ", i, ", ", declared[i].name());
      stack.push_back(*fallback);
    }
    for (size_t i = 0; i < n_args; ++i) {
      check_defined(stack[i], declared[i]);
      check_enumerated(stack[i], declared[i]);
    }
    if (fused != 0) check_fused(declared, stack);
    handle(op).callBoxed(stack);
    size_t written = 0;
    try {
      for (; written < stack.size(); ++written) results[written] = from_ivalue(stack[written]);
    } catch (...) {
      for (size_t i = 0; i < written; ++i) release(results[i]);
      throw;
    }
    *n_results = written;
  });
}
