// Calls any operator of libtorch by name through the boxed dispatcher. One entry point serves the foreach, fused and
// amp operators that tch leaves out; boxing costs well under a microsecond beside the operators themselves.
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

}  // namespace

od_status od_op_find(const char* name, const char* overload, const od_op** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto found = c10::Dispatcher::singleton().findSchemaOrThrow(name, overload);
    // Operators are registered for the life of the process, and so is this handle.
    *out = reinterpret_cast<const od_op*>(new c10::OperatorHandle(found));
  });
}

od_status od_op_call(const od_op* op, const od_value* args, size_t n_args, od_value* results, size_t max_results,
                     size_t* n_results, od_error* err) noexcept {
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
