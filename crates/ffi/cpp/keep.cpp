// Results of chosen operators, kept in one run of a function and reused in the next: selective activation
// checkpointing.
#include "keep.h"

#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include <ATen/Context.h>
#include <ATen/core/Generator.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include "guarded.h"
#include "owned.h"

namespace {

using c10::IValue;
using c10::OperatorHandle;
using overdrive::Owned;
using torch::jit::Stack;

// A result without its history, and its version when it was kept.
struct KeptTensor {
  at::Tensor tensor;
  int64_t version;
};

// A generator, and the state that an operator has left it in.
struct Drawn {
  at::Generator generator;
  at::Tensor state;
};

// The results of one call of an operator.
struct Kept {
  std::vector<IValue> results;
  std::vector<KeptTensor> tensors;
  std::optional<Drawn> drawn;  // for operators that draw

  bool is_changed() const {
    return std::any_of(tensors.begin(), tensors.end(),
                       [](const KeptTensor& kept) { return kept.tensor._version() != kept.version; });
  }
};

at::Tensor state_of(at::Generator generator) {
  std::lock_guard<std::mutex> lock(generator.mutex());
  return generator.get_state();
}

// On a device, operators have only begun when they return.
void wait_for_devices(const Stack& stack) {
  auto wait = [](const at::Tensor& tensor) {
    if (tensor.defined() && tensor.is_cuda())
      at::detail::getCUDAHooks().deviceSynchronize(tensor.device().index());
  };
  for (const auto& value : stack) {
    if (value.isTensor()) wait(value.toTensor());
    if (value.isTensorList())
      for (const at::Tensor& tensor : value.toTensorList()) wait(tensor);
  }
}

// Keeps only new tensors of pure results, because an operator that writes, or returns views or lists, has to run.
bool can_be_kept(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments())
    if (argument.alias_info() != nullptr) return false;
  for (const auto& result : schema.returns())
    if (result.type()->kind() == c10::TypeKind::ListType) return false;
  return !schema.returns().empty();
}

template <typename Map>
IValue mapped(const IValue& value, Map&& map) {
  if (value.isTensor() && value.toTensor().defined()) return map(value.toTensor());
  return value;
}

}  // namespace

struct od_keeper {
  using Keeps = int32_t (*)(void*, size_t, const char*, const char*);
  using Ran = void (*)(void*, uint64_t, const void*, size_t);

  od_keeper(Owned owned, Keeps keeps, Ran ran) : owned(std::move(owned)), keeps(keeps), ran(ran) {}

  bool is_kept(const OperatorHandle& op, size_t call) {
    const auto& schema = op.schema();
    return keeps(owned.get(), call, schema.name().c_str(), schema.overload_name().c_str()) != 0;
  }

  void measure(const OperatorHandle& op, const Stack& stack, c10::function_ref<void()> run) {
    wait_for_devices(stack);
    auto begin = std::chrono::steady_clock::now();
    run();
    wait_for_devices(stack);
    auto nanoseconds = std::chrono::duration_cast<std::chrono::nanoseconds>(std::chrono::steady_clock::now() - begin);
    for (auto at = stack.end() - static_cast<ptrdiff_t>(op.schema().returns().size()); at != stack.end(); ++at) {
      if (!at->isTensor() || !at->toTensor().has_storage()) continue;
      const auto& storage = at->toTensor().storage();
      ran(owned.get(), static_cast<uint64_t>(nanoseconds.count()), storage.data(), storage.nbytes());
    }
  }

  void keep(const OperatorHandle& op, size_t call, const Stack& stack, std::optional<Drawn> drawn) {
    Kept kept{{}, {}, std::move(drawn)};
    size_t count = op.schema().returns().size();
    for (auto at = stack.end() - static_cast<ptrdiff_t>(count); at != stack.end(); ++at)
      kept.results.push_back(mapped(*at, [&](const at::Tensor& tensor) {
        kept.tensors.push_back({tensor.tensor_data(), tensor._version()});
        return IValue(kept.tensors.back().tensor);
      }));
    std::lock_guard<std::mutex> lock(mutex);
    places[{&op.schema(), call}] = calls.size();
    calls.emplace_back(std::move(kept));
  }

  bool has_run(const OperatorHandle& op, size_t call) {
    std::lock_guard<std::mutex> lock(mutex);
    return places.count({&op.schema(), call}) != 0;
  }

  // Empty if the result was freed.
  std::optional<Kept> find(const OperatorHandle& op, size_t call) {
    std::lock_guard<std::mutex> lock(mutex);
    auto found = places.find({&op.schema(), call});
    return found == places.end() ? std::nullopt : calls[found->second];
  }

  std::mutex mutex;
  // How many of the first calls are needed.
  size_t needed = 0;
  // The kept calls of operators; empty if their results were freed.
  std::vector<std::optional<Kept>> calls;
  // The index in `calls` of each call, by its operator and its number among the operator's calls.
  std::map<std::pair<const c10::FunctionSchema*, size_t>, size_t> places;
  std::shared_ptr<od_keeper> self;  // until od_keeper_free
  Owned owned;
  Keeps keeps;
  Ran ran;  // null if nothing is measured
};

namespace {

struct Run {
  std::shared_ptr<od_keeper> keeper;  // a run that is never ended keeps it
  bool reuse;
  std::map<const c10::FunctionSchema*, size_t> calls;  // so far, of operators whose results can be kept
};

thread_local std::vector<Run> runs;
// Whether the thread's operators were intercepted before the first run.
thread_local bool was_included = false;

void reuse(const OperatorHandle& op, Stack& stack, const Kept& kept) {
  torch::jit::drop(stack, op.schema().arguments().size());
  for (const auto& result : kept.results)
    stack.push_back(mapped(result, [](const at::Tensor& tensor) { return IValue(tensor.tensor_data()); }));
  if (!kept.drawn) return;
  auto generator = kept.drawn->generator;
  std::lock_guard<std::mutex> lock(generator.mutex());
  generator.set_state(kept.drawn->state);
}

// The generator that an operator draws from: that of its first tensor's device, or of the device on which it makes a
// tensor.
at::Generator generator_of(const OperatorHandle& op, const Stack& stack) {
  at::Device device = at::kCPU;
  for (auto at = stack.end() - static_cast<ptrdiff_t>(op.schema().arguments().size()); at != stack.end(); ++at) {
    if (at->isTensor() && at->toTensor().defined()) return at::globalContext().defaultGenerator(at->toTensor().device());
    if (at->isDevice()) device = at->toDevice();
  }
  return at::globalContext().defaultGenerator(device);
}

}  // namespace

namespace overdrive {

void run_or_reuse(const OperatorHandle& op, Stack& stack, c10::function_ref<void()> run) {
  if (runs.empty() || !can_be_kept(op.schema())) return run();
  auto& keeper = *runs.back().keeper;
  size_t call = runs.back().calls[&op.schema()]++;
  if (!keeper.is_kept(op, call)) {
    if (keeper.ran == nullptr || runs.back().reuse) return run();
    return keeper.measure(op, stack, run);
  }
  if (runs.back().reuse) {
    bool has_run = keeper.has_run(op, call);
    // Whether autocast casts a weight again depends on its cache.
    TORCH_CHECK(has_run || op.schema().name() == "aten::_to_copy", op.schema().name(),
                " runs more often than the first time");
    auto kept = keeper.find(op, call);
    return kept && !kept->is_changed() ? reuse(op, stack, *kept) : run();
  }
  std::optional<Drawn> drawn;
  if (op.hasTag(at::Tag::nondeterministic_seeded)) {
    auto generator = generator_of(op, stack);
    drawn = Drawn{generator, state_of(generator)};
  }
  run();
  if (drawn) {
    auto after = state_of(drawn->generator);
    if (after.equal(drawn->state)) drawn.reset();
    else drawn->state = std::move(after);
  }
  keeper.keep(op, call, stack, std::move(drawn));
}

}  // namespace overdrive

od_status od_keeper_new(void* owner, int32_t (*keeps)(void*, size_t, const char*, const char*),
                        void (*ran)(void*, uint64_t, const void*, size_t), void (*drop)(void*),
                        od_keeper** out, od_error* err) noexcept {
  Owned owned(owner, drop);
  return overdrive::guarded(err, [&] {
    auto made = std::make_shared<od_keeper>(std::move(owned), keeps, ran);
    made->self = made;
    *out = made.get();
  });
}

od_status od_keeper_begin(od_keeper* keeper, int32_t reuse, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    if (runs.empty()) was_included = c10::impl::tls_is_dispatch_key_included(c10::DispatchKey::Fake);
    runs.push_back({keeper->self, reuse != 0, {}});
    c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::Fake, true);
  });
}

void od_keeper_end(od_keeper* keeper) noexcept {
  auto found = std::find_if(runs.rbegin(), runs.rend(), [&](const Run& run) { return run.keeper.get() == keeper; });
  if (found == runs.rend()) return;
  runs.erase(std::next(found).base());
  if (runs.empty()) c10::impl::tls_set_dispatch_key_included(c10::DispatchKey::Fake, was_included);
}

void od_keeper_need(od_keeper* keeper) noexcept {
  std::lock_guard<std::mutex> lock(keeper->mutex);
  keeper->needed = keeper->calls.size();
}

void od_keeper_finish(od_keeper* keeper) noexcept {
  std::lock_guard<std::mutex> lock(keeper->mutex);
  for (size_t i = 0; i < keeper->calls.size(); ++i) {
    auto& call = keeper->calls[i];
    if (call && (i >= keeper->needed || call->is_changed())) call.reset();
  }
}

size_t od_keeper_bytes(od_keeper* keeper) noexcept {
  std::lock_guard<std::mutex> lock(keeper->mutex);
  size_t bytes = 0;
  for (const auto& call : keeper->calls)
    if (call)
      for (const auto& kept : call->tensors) bytes += kept.tensor.nbytes();
  return bytes;
}

void od_keeper_free(od_keeper* keeper) noexcept { auto last = std::move(keeper->self); }
