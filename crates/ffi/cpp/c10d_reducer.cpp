// DDP's engine, c10d::Reducer, adapted to gradient accumulation, gradient hooks and hooks in Rust.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/distributed/c10d/logger.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <limits>
#include <unordered_set>

#include "backward_passes.h"
#include "c10d_guarded.h"
#include "c10d_held_reducer.h"
#include "c10d_lent_hook.h"

namespace {

using overdrive::HeldReducer;

struct WeakReducer final : torch::CustomClassHolder {
  explicit WeakReducer(const std::shared_ptr<HeldReducer>& reducer) : reducer(reducer), pass(reducer->pass()) {}
  std::weak_ptr<HeldReducer> reducer;
  int64_t pass;
};

// Notices when backward begins, and passes on every output's gradient, defined or not, so that the reducer also learns
// of parameters whose outputs the loss does not use.
struct Sink : torch::autograd::Function<Sink> {
  static torch::autograd::variable_list forward(torch::autograd::AutogradContext* context, at::TensorList outputs,
                                                const c10::intrusive_ptr<WeakReducer>& reducer) {
    context->set_materialize_grads(false);
    context->saved_data["reducer"] = c10::IValue::make_capsule(reducer);
    torch::autograd::variable_list copies;
    for (const auto& output : outputs) copies.push_back(output.clone());
    return copies;
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    auto weak = c10::static_intrusive_pointer_cast<WeakReducer>(context->saved_data["reducer"].toCapsule());
    auto reducer = weak->reducer.lock();
    if (reducer) reducer->raise_at_end(weak->pass);
    if (reducer && reducer->takes_delay())
      torch::autograd::Engine::get_default_engine().queue_callback([reducer] { reducer->delay_all_reduce(); });
    grads.emplace_back();
    return grads;
  }
};

// Its backward makes the reducer average the accumulated gradients.
struct HandOver : torch::autograd::Function<HandOver> {
  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& origin,
                            const c10::intrusive_ptr<WeakReducer>& reducer) {
    context->saved_data["reducer"] = c10::IValue::make_capsule(reducer);
    return origin.clone();
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 const torch::autograd::variable_list&) {
    auto weak = c10::static_intrusive_pointer_cast<WeakReducer>(context->saved_data["reducer"].toCapsule());
    if (auto reducer = weak->reducer.lock()) {
      reducer->raise_at_end(weak->pass);
      reducer->hand_over();
    }
    return {at::Tensor(), at::Tensor()};
  }
};

std::vector<size_t> bucket_limits(const od_reducer_options& options) {
  if (options.bucket_list_length > 0) return {options.bucket_list, options.bucket_list + options.bucket_list_length};
  // One bucket until the order of gradients is known. With a search for unused parameters it is never determined.
  if (options.static_graph != 0 || options.find_unused_parameters == 0)
    return {static_cast<size_t>(std::numeric_limits<int64_t>::max())};
  auto cap = static_cast<size_t>(options.bucket_bytes);
  if (options.default_buckets != 0) return {static_cast<size_t>(options.first_bucket_bytes), cap};
  return {cap};
}

}  // namespace

struct od_reducer {
  c10::intrusive_ptr<c10d::ProcessGroup> group;
  std::shared_ptr<HeldReducer> reducer;
  std::shared_ptr<c10d::Logger> logger;
  overdrive::LentHook* hook = nullptr;  // owned by the reducer
  // To read a device's timers, the host waits for the device.
  bool reads_timers = false;
};

namespace {

bool within_backward(const od_reducer& reducer) {
  // A hook runs while the reducer is locked.
  return (reducer.hook != nullptr && reducer.hook->is_under_way()) || overdrive::within_pass();
}

// For calls that take the reducer's lock, which this thread may already hold.
template <typename Body>
od_status between_ranks(const od_reducer& reducer, od_error* err, Body&& body) noexcept {
  return overdrive::between_ranks(err, [&] {
    TORCH_CHECK(!within_backward(reducer), "a reducer cannot be used while its backward pass or hook runs");
    body();
  });
}

// All that a pass uses.
std::vector<at::Tensor> with_frozen(std::vector<at::Tensor> params, const od_tensor_list* frozen) {
  if (frozen == nullptr) return params;
  for (const auto& more : overdrive::to_vector(frozen)) params.push_back(more);
  return params;
}

// Ends what `LowPrecision::lower` has begun, also where a constructor fails.
struct Raised {
  explicit Raised(overdrive::LowPrecision* low) : low(low) {}
  Raised(const Raised&) = delete;
  Raised& operator=(const Raised&) = delete;
  void now() {
    if (auto* lowered = std::exchange(low, nullptr)) lowered->raise(false);
  }
  ~Raised() {
    try {
      now();
    } catch (...) {
    }
  }
  overdrive::LowPrecision* low;
};

// Checks before construction: a reducer whose constructor fails halfway leaves hooks behind that call freed memory.
void check_parameters(const std::vector<at::Tensor>& params) {
  TORCH_CHECK(!params.empty(), "a reducer needs at least one parameter");
  std::unordered_set<const c10::TensorImpl*> seen;
  for (const auto& param : params) {
    TORCH_CHECK(param.defined() && param.requires_grad() && param.is_leaf() && param.layout() == at::kStrided,
                "a reducer's parameters have to be dense leaves that require a gradient");
    TORCH_CHECK(seen.insert(param.unsafeGetTensorImpl()).second, "a reducer takes each parameter once");
  }
}

}  // namespace

od_status od_reducer_new(const od_group* group, const od_tensor_list* params, const char* const* names,
                         const uint8_t* are_sparse, const od_reducer_options* options, od_reducer** out,
                         od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] {
    auto tensors = overdrive::to_vector(params);
    check_parameters(tensors);
    std::vector<bool> sparse(are_sparse, are_sparse + tensors.size());
    std::unique_ptr<overdrive::LowPrecision> low;
    if (options->low_dtype >= 0) {
      auto dtype = static_cast<at::ScalarType>(options->low_dtype);
      low = std::make_unique<overdrive::LowPrecision>(with_frozen(tensors, options->frozen), dtype);
      low->lower();
    }
    Raised raised(low.get());
    auto buckets = std::get<0>(c10d::compute_bucket_assignment_by_size(tensors, bucket_limits(*options), sparse));
    // Gradients become ready in the reverse order of use.
    std::reverse(buckets.begin(), buckets.end());
    std::unordered_map<size_t, std::string> named;
    for (size_t i = 0; i < tensors.size(); ++i) named[i] = names[i];
    std::unique_ptr<od_reducer, decltype(&od_reducer_free)> made(new od_reducer(), &od_reducer_free);
    made->group = group->group;
    made->reads_timers = tensors[0].is_cpu() || c10d::debug_level() == c10d::DebugLevel::Detail;
    overdrive::between_passes(tensors, [&] {
      made->reducer = std::make_shared<HeldReducer>(
          tensors, buckets, group->group, sparse, options->bucket_bytes, options->find_unused_parameters != 0,
          options->gradient_as_bucket_view != 0, named,
          options->default_buckets != 0 ? options->first_bucket_bytes : options->bucket_bytes,
          options->skip_unused != 0, false,
          std::vector<int64_t>(options->bucket_list, options->bucket_list + options->bucket_list_length));
      overdrive::average(tensors, made->reducer);
    });
    raised.now();
    made->reducer->set_low(std::move(low));
    made->logger = std::make_shared<c10d::Logger>(made->reducer);
    made->reducer->set_logger(made->logger);
    // The logger casts every backend named Gloo to Gloo, and would read past the end of the wrapper of a group that
    // verifies.
    if (!group->verifies)
      made->logger->set_construction_data_and_log("overdrive", {}, -1, options->broadcast_buffers != 0, false,
                                                  options->static_graph != 0);
    if (options->static_graph != 0) {
      made->reducer->set_static_graph();
      made->logger->set_static_graph();
    }
    *out = made.release();
  });
}

// libtorch's destructor would remove the hooks at once, although a backward pass of another thread may be using them,
// or Rust may be dropping the reducer within its own communication hook.
void od_reducer_free(od_reducer* reducer) noexcept {
  try {
    if (reducer->reducer)
      overdrive::when_no_pass_runs([reducer = reducer->reducer, logger = reducer->logger] { reducer->detach(); });
    delete reducer;
  } catch (...) {
    // Out of memory: the reducer is leaked.
  }
}

od_status od_reducer_before_forward(const od_reducer* reducer, int32_t synchronised, int32_t* rebuilt,
                                    od_error* err) noexcept {
  return between_ranks(*reducer, err, [&] {
    if (synchronised != 0) {
      if (reducer->reads_timers) reducer->logger->set_runtime_stats_and_log();
      reducer->reducer->prepare_for_forward();
    }
    *rebuilt = reducer->reducer->rebuild_buckets();
  });
}

od_status od_reducer_lower(const od_reducer* reducer, int32_t* out, od_error* err) noexcept {
  return between_ranks(*reducer, err, [&] { *out = reducer->reducer->lower() ? 1 : 0; });
}

od_status od_reducer_raise(const od_reducer* reducer, od_error* err) noexcept {
  return between_ranks(*reducer, err, [&] { reducer->reducer->raise(false); });
}

od_status od_reducer_arm(const od_reducer* reducer, const od_tensor_list* outputs, od_error* err) noexcept {
  return between_ranks(*reducer, err, [&] { reducer->reducer->arm(overdrive::to_vector(outputs)); });
}

od_status od_reducer_disarm(const od_reducer* reducer, od_error* err) noexcept {
  return between_ranks(*reducer, err, [&] { reducer->reducer->disarm(); });
}

od_status od_reducer_close_with_nothing(const od_reducer* reducer, od_error* err) noexcept {
  return between_ranks(*reducer, err, [&] {
    c10::AutoGradMode with_gradients(true);
    auto weak = c10::make_intrusive<WeakReducer>(reducer->reducer);
    reducer->reducer->arm({});
    if (reducer->reducer->may_hand_over()) {
      HandOver::apply(reducer->reducer->origin(), weak).backward();
    } else {
      auto zero = reducer->reducer->zero();
      Sink::apply(at::TensorList(zero), weak)[0].backward();
    }
  });
}

int32_t od_reducer_within_backward(const od_reducer* reducer) noexcept { return within_backward(*reducer) ? 1 : 0; }

od_status od_reducer_sink(const od_reducer* reducer, const od_tensor_list* outputs, od_tensor_list** out,
                          od_error* err) noexcept {
  return between_ranks(*reducer, err, [&] {
    auto tensors = overdrive::to_vector(outputs);
    torch::autograd::variable_list differentiable;
    for (const auto& tensor : tensors)
      if (tensor.requires_grad()) differentiable.push_back(tensor);
    if (!differentiable.empty() && reducer->reducer->needs_sink()) {
      auto copies = Sink::apply(at::TensorList(differentiable), c10::make_intrusive<WeakReducer>(reducer->reducer));
      auto copy = copies.begin();
      for (auto& tensor : tensors)
        if (tensor.requires_grad()) tensor = *copy++;
    }
    *out = overdrive::to_list(tensors);
  });
}

od_status od_reducer_fp16_hook(const od_reducer* reducer, od_error* err) noexcept {
  return between_ranks(*reducer, err, [&] {
    reducer->reducer->compress_to_half();
    reducer->logger->set_comm_hook("FP16_COMPRESS");
  });
}

od_status od_reducer_set_hook(od_reducer* reducer, void* owner, int32_t (*start)(void*, const od_bucket*),
                              at::Tensor* (*finish)(void*, size_t), void (*drop)(void*), od_error* err) noexcept {
  std::unique_ptr<overdrive::LentHook> hook;
  try {
    // The reducer owns the hook.
    auto places = [held = reducer->reducer.get()](const at::Tensor& buffer) { return held->place(buffer); };
    hook = std::make_unique<overdrive::LentHook>(owner, start, finish, drop, places);
  } catch (const std::bad_alloc& e) {
    drop(owner);
    return overdrive::fail(err, OD_OUT_OF_MEMORY, e.what(), e.what());
  }
  return between_ranks(*reducer, err, [&] {
    auto* lent = hook.get();
    reducer->reducer->set_hook(std::move(hook));
    reducer->hook = lent;
    reducer->logger->set_comm_hook("overdrive");
  });
}

od_status od_reducer_layout(const od_reducer* reducer, size_t* numbers, size_t* lengths, size_t* count,
                            int32_t* is_final, od_error* err) noexcept {
  return between_ranks(*reducer, err, [&] {
    auto buckets = reducer->reducer->layout();
    for (const auto& bucket : buckets) {
      numbers = std::copy(bucket.begin(), bucket.end(), numbers);
      *lengths++ = bucket.size();
    }
    *count = buckets.size();
    *is_final = reducer->reducer->is_final() ? 1 : 0;
  });
}

od_status od_reducer_lay_out(const od_reducer* reducer, const size_t* numbers, const size_t* lengths, size_t count,
                             int32_t is_final, od_error* err) noexcept {
  return between_ranks(*reducer, err, [&] {
    std::vector<std::vector<size_t>> buckets;
    for (size_t i = 0; i < count; numbers += lengths[i++]) buckets.emplace_back(numbers, numbers + lengths[i]);
    reducer->reducer->lay_out(std::move(buckets), is_final != 0);
  });
}

od_status od_reducer_shadow(od_reducer* reducer, od_error* err) noexcept {
  return between_ranks(*reducer, err, [&] {
    auto buckets = reducer->reducer->get_grad_buckets(/*return_zero_tensors=*/true);
    std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
    for (auto& bucket : buckets) futures.push_back(reducer->reducer->run_comm_hook(bucket));
    for (const auto& future : futures) {
      future->wait();
      auto value = future->value();
      if (reducer->hook != nullptr) reducer->hook->parseHookResult(value);
    }
    if (reducer->reducer->finds_unused()) {
      std::vector<at::Tensor> used{at::zeros_like(reducer->reducer->get_local_used_map_on_device())};
      reducer->group->allreduce(used)->wait();
    }
    reducer->reducer->push_rebuilt_params_for_all_indices();
  });
}

od_status od_reducer_divide_by(const od_reducer* reducer, const od_work* active_ranks, int32_t by_world_size,
                               od_error* err) noexcept {
  return between_ranks(
      *reducer, err, [&] { reducer->reducer->set_forward_pass_work_handle(active_ranks->work, by_world_size != 0); });
}

od_status od_reducer_set_log_rate(od_reducer* reducer, int32_t steps, od_error* err) noexcept {
  return between_ranks(*reducer, err, [&] {
    reducer->reducer->set_ddp_runtime_logging_sample_rate(steps);
    reducer->reads_timers = true;
  });
}

od_status od_reducer_log(const od_reducer* reducer, void* visitor, void (*visit)(void*, const char*, const char*),
                         od_error* err) noexcept {
  return between_ranks(*reducer, err, [&] {
    auto data = reducer->logger->get_ddp_logging_data();
    for (const auto& [key, value] : data.strs_map) visit(visitor, key.c_str(), value.c_str());
    for (const auto& [key, value] : data.ints_map) visit(visitor, key.c_str(), std::to_string(value).c_str());
  });
}
