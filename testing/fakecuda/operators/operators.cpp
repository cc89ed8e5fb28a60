// The numbers of a device without one. Each operator that libtorch has a CUDA kernel for is called as ever, so that its
// launches, copies and waits are those of a real device; then the same operator of the host is put into the stream that it
// used, over the same bytes. It runs when the stream comes to it, in order with everything else.
#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/record_function.h>
#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include "decided.h"
#include "draws.h"
#include "emulated.h"
#include "libraries.h"
#include "snapshot.h"
#include "within.h"

namespace fakecuda {
namespace {

using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::IValue;
using c10::OperatorHandle;
using torch::jit::Stack;

// Operators within an operator are part of it: their numbers would be computed twice, and an update in place made twice.
thread_local int depth = 0;
struct Within {
  explicit Within(const OperatorHandle& op) {
    if (depth++ == 0) fakecuda_within(op.schema().name().c_str());
  }
  ~Within() {
    if (--depth == 0) fakecuda_within(nullptr);
  }
};

// Batch normalisation updates these, though its schema says that it only reads them.
bool is_hidden_result(const OperatorHandle& op, const c10::Argument& argument) {
  const auto& name = op.schema().name();
  bool updates = name == "aten::native_batch_norm" || name == "aten::cudnn_batch_norm" ||
                 name == "aten::batch_norm_gather_stats_with_counts" || name == "aten::batch_norm_gather_stats";
  return updates && (argument.name() == "running_mean" || argument.name() == "running_var");
}

bool is_written(const OperatorHandle& op, const c10::Argument& argument) {
  return (argument.alias_info() != nullptr && argument.alias_info()->isWrite()) || is_hidden_result(op, argument);
}

// These return memory that they do not write; `resize_` adds some.
bool leaves_unwritten(const OperatorHandle& op) {
  const auto& name = op.schema().name();
  return name == "aten::empty" || name == "aten::empty_strided" || name == "aten::resize_";
}

// A call that waits for its turn.
struct Call {
  OperatorHandle op;
  Stack arguments;
  // What the results are written to, apart from the arguments that the operator writes.
  std::vector<IValue> results;
  std::vector<fakecuda_range> ranges;
  std::optional<Draws> draws;
  // Why it failed.
  std::string failure;

  void write(const IValue& target, const IValue& value) const {
    if (target.isTensorList()) {
      auto targets = target.toTensorVector();
      auto values = value.isTensorList() ? value.toTensorVector() : std::vector<at::Tensor>();
      values.resize(targets.size());
      for (size_t i = 0; i < targets.size(); ++i) write(targets[i], values[i]);
    } else if (target.isTensor() && target.toTensor().defined() && target.toTensor().is_sparse()) {
      auto to = target.toTensor(), from = value.toTensor();
      write(to._indices(), from._indices());
      write(to._values(), from._values());
    } else if (target.isTensor() && target.toTensor().defined() && target.toTensor().numel() > 0) {
      auto to = target.toTensor();
      auto from = value.isTensor() ? value.toTensor() : at::Tensor();
      // The host's operator does without what the device's returns.
      if (!from.defined() || from.numel() == 0) return fakecuda_not_computed(to.data_ptr(), span(to));
      TORCH_CHECK(to.numel() == from.numel(), "a result of size ", from.sizes(), " instead of ", to.sizes());
      to.copy_(from.sizes() == to.sizes() ? from : from.reshape(to.sizes()));
    }
  }

  // Null, or why it failed.
  const char* run() {
    // The profiler has seen the operator when it was called.
    at::RecordFunctionGuard unseen(false);
    OnHost on_host_only;
    try {
      Stack stack = arguments;
      auto formula = formula_of(op.schema().name());
      auto compute = [&] { formula ? formula(stack) : op.callBoxed(stack); };
      draws ? draws->with(stack, compute) : compute();
      stack.resize(std::max(stack.size(), results.size()));
      for (size_t i = 0; i < results.size(); ++i) write(results[i], stack[i]);
    } catch (const std::exception& error) {
      auto text = std::string(error.what());
      failure = "operator " + op.schema().name() + " (" + text.substr(0, text.find('\n')) + ")";
      return failure.c_str();
    }
    return nullptr;
  }
};

// Calls the operator itself, or launches what a library would.
void call_original(const c10::SafeKernelFunction& original, const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
  // Those with an `out` are not called by any program here.
  const auto* library = op.schema().overload_name().empty() ? library_of(op.schema().name()) : nullptr;
  if (library != nullptr && library->is_cudnn && !at::globalContext().userEnabledCuDNN()) library = nullptr;
  if (library == nullptr) return original.callBoxed(op, keys, stack);
  auto count = static_cast<std::ptrdiff_t>(op.schema().arguments().size());
  Stack arguments(stack->end() - count, stack->end());
  stack->resize(stack->size() - arguments.size());
  auto results = library->allocate(arguments);
  auto* stream = c10::cuda::getCurrentCUDAStream().stream();
  for (const auto& kernel : library->kernels(arguments)) {
    TORCH_CHECK(fakecuda_launch(kernel.c_str(), stream) == 0, kernel, " could not be launched");
  }
  for (auto& result : results) stack->push_back(std::move(result));
}

// Whether what an operator has written for the host is there when it returns.
bool waits_for_results(const OperatorHandle& op, const Stack& stack) {
  const auto& schema = op.schema();
  auto first = stack.size() - schema.returns().size();
  for (size_t i = 0; i < schema.returns().size(); ++i) {
    const auto& value = stack[first + i];
    if (value.isTensor() && value.toTensor().defined() && !value.toTensor().is_cuda()) return true;
  }
  return false;
}

class Wrapped final : public c10::OperatorKernel {
 public:
  Wrapped(c10::SafeKernelFunction original) : original_(std::move(original)) {}

  void operator()(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    if (is_decided_on_host(op.schema().name())) {
      Within within(op);
      return decide_on_host(op, stack);
    }
    if (depth > 0) return call_original(original_, op, keys, stack);
    if (leaves_unwritten(op)) return allocate(op, keys, stack);
    const auto& schema = op.schema();
    const auto& declared = schema.arguments();
    size_t count = declared.size();
    auto call = std::make_unique<Call>(Call{op, {}, {}, {}, Draws::of(op, *stack), {}});
    std::vector<std::pair<size_t, IValue>> written;
    {
      Within within(op);
      at::RecordFunctionGuard unseen(false);
      for (size_t i = 0; i < count; ++i) {
        const auto& value = (*stack)[stack->size() - count + i];
        bool writes = is_written(op, declared[i]);
        if (writes) written.emplace_back(i, value);
        call->arguments.push_back(writes ? IValue() : snapshot(value, Use::READ, call->ranges));
      }
    }
    auto before = fakecuda_launched();
    {
      Within within(op);
      call_original(original_, op, keys, stack);
    }
    // Copies and fills are the runtime's own, and real.
    if (fakecuda_launched() == before) return;
    Within within(op);
    // An `out` argument may have been resized.
    for (const auto& [i, value] : written) call->arguments[i] = snapshot(value, Use::UPDATE, call->ranges);
    const auto& returns = schema.returns();
    for (size_t i = 0; i < returns.size(); ++i) {
      const auto& value = (*stack)[stack->size() - returns.size() + i];
      bool is_argument = returns[i].alias_info() != nullptr;
      call->results.push_back(is_argument ? IValue() : snapshot(value, Use::RESULT, call->ranges));
    }
    bool waits = waits_for_results(op, *stack);
    push(std::move(call));
    if (waits) fakecuda_finish(fakecuda_last_stream());
  }

 private:
  // The allocator hands out memory that was freed: without this, it would still hold numbers.
  void allocate(const OperatorHandle& op, DispatchKeySet keys, Stack* stack) {
    auto before = bytes_behind((*stack)[stack->size() - op.schema().arguments().size()]);
    {
      Within within(op);
      call_original(original_, op, keys, stack);
    }
    auto after = bytes_behind(stack->back());
    if (after <= before) return;
    auto tensor = stack->back().toTensor();
    auto stream = c10::cuda::getCurrentCUDAStream(tensor.device().index());
    const auto* begin = static_cast<const char*>(tensor.storage().data());
    fakecuda_unwritten(stream.stream(), op.schema().name().c_str(), begin + before, after - before);
  }

  static void push(std::unique_ptr<Call> call) {
    auto name = call->op.schema().name();
    auto* data = call.release();
    fakecuda_operator(
        fakecuda_last_stream(), name.c_str(), data->ranges.data(), data->ranges.size(),
        [](void* own) { return static_cast<Call*>(own)->run(); }, [](void* own) { delete static_cast<Call*>(own); }, data);
  }

  c10::SafeKernelFunction original_;
};

// Stays until the program ends, like libtorch's own registrations.
std::vector<c10::RegistrationHandleRAII>& registrations() {
  static auto* all = new std::vector<c10::RegistrationHandleRAII>();
  return *all;
}

// libtorch warns when an operator gets another kernel; here each one does, on purpose.
class Quiet final : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

// Another one that returns a number is made of operators, which have numbers of their own.
bool has_numbers(const OperatorHandle& op) {
  if (is_decided_on_host(op.schema().name())) return true;
  const auto& returns = op.schema().returns();
  return std::all_of(returns.begin(), returns.end(), [](const c10::Argument& value) {
    auto kind = value.type()->kind();
    return kind != c10::TypeKind::BoolType && kind != c10::TypeKind::NumberType && kind != c10::TypeKind::FloatType;
  });
}

void wrap(DispatchKey key, const std::vector<c10::OperatorName>& names) {
  auto& dispatcher = c10::Dispatcher::singleton();
  for (const auto& name : names) {
    auto op = dispatcher.findOp(name);
    if (!op || !op->hasSchema() || !has_numbers(*op)) continue;
    auto original = op->getComputedKernelForDispatchKey(key);
    auto kernel = c10::KernelFunction::makeFromBoxedFunctor(std::make_unique<Wrapped>(std::move(original)));
    registrations().push_back(
        dispatcher.registerImpl(name, key, std::move(kernel), std::nullopt, nullptr, "fakecuda"));
  }
}

void wrap_all() {
  Quiet quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
  auto names = c10::Dispatcher::singleton().getRegistrationsForDispatchKey(DispatchKey::CUDA);
  // These launch kernels of CUDA themselves, though they are registered for every device.
  names.push_back({"aten::copy_", ""});
  names.push_back({"aten::convolution_backward", ""});
  wrap(DispatchKey::CUDA, names);
  wrap(DispatchKey::SparseCUDA, c10::Dispatcher::singleton().getRegistrationsForDispatchKey(DispatchKey::SparseCUDA));
}

[[maybe_unused]] const bool wrapped = (wrap_all(), true);

}  // namespace

bool is_within_operator() { return depth > 0; }

}  // namespace fakecuda
