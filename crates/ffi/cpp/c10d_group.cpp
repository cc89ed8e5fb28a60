// Process groups: construction, destruction, and operations of the whole group.
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/distributed/c10d/FlightRecorder.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <torch/csrc/distributed/c10d/comm.hpp>
#include <torch/csrc/distributed/c10d/reducer.hpp>

#include <future>
#include <thread>

#include "c10d_backends.h"
#include "c10d_guarded.h"
#include "c10d_tcp_client.h"

namespace {

using BackendPtr = c10::intrusive_ptr<c10d::Backend>;
using c10d::ProcessGroup;
using Clock = std::chrono::steady_clock;

// Uses PyTorch's key prefixes, so that ranks here and in Python find each other.
void add_backend(od_group& group, const c10::intrusive_ptr<c10d::Store>& store, const od_group_options& options,
                 c10::DeviceType device, ProcessGroup::BackendType type) {
  auto prefixed = c10::make_intrusive<c10d::PrefixStore>(c10::DeviceTypeName(device, true) + "/", store);
  BackendPtr backend = type == ProcessGroup::BackendType::NCCL ? overdrive::new_nccl(prefixed, options)
                                                               : overdrive::new_gloo(prefixed, options);
  group.backends.push_back(backend);
  if (options.verify != 0) {
    auto helpers = c10::make_intrusive<c10d::PrefixStore>(std::string("pg_wrapper:") + options.name, prefixed);
    BackendPtr helper = overdrive::new_gloo(helpers, options);
    group.backends.push_back(helper);
    backend = overdrive::verified(backend, helper);
  }
  group.group->setBackend(device, type, backend);
  // As in PyTorch, a group with only Gloo accepts CUDA tensors too, and copies them through the host.
  if (options.backend == OD_GLOO) group.group->setBackend(at::kCUDA, type, backend);
}

bool is_idle(const od_group& group) {
  return std::all_of(group.backends.begin(), group.backends.end(), [](const auto& backend) {
    return overdrive::gloo_is_idle(*backend) && overdrive::nccl_is_idle(*backend);
  });
}

bool is_idle_by(const od_group& group, Clock::time_point deadline) {
  while (!is_idle(group)) {
    if (Clock::now() >= deadline) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

// Keys under `connections`, which users' keys share: how many members have connected, and that all have.
constexpr const char* CONNECTED = "overdrive/connected";
constexpr const char* ALL_CONNECTED = "overdrive/all_connected";
// A member in Python does not count itself.
constexpr std::chrono::milliseconds LONGEST_HOLD{2000};
// Between two questions, and what an answer may take: other threads have their turns at the store meanwhile.
constexpr std::chrono::milliseconds PAUSE{20};
constexpr std::chrono::milliseconds ANSWER{200};

// Waits until all members have connected: Gloo fails for one that finds its peer gone again while it still connects. Not
// where the store is gone. Takes a second longer where another thread has the turn at the end.
void hold_until_connected(const c10::intrusive_ptr<c10d::Store>& connections,
                          std::chrono::milliseconds longest = LONGEST_HOLD) noexcept {
  if (!connections) return;
  for (auto deadline = Clock::now() + longest; Clock::now() < deadline; std::this_thread::sleep_for(PAUSE)) {
    try {
      overdrive::TcpClient::Limit limit(ANSWER);
      if (connections->check({ALL_CONNECTED})) return;
    } catch (const c10::DistStoreError&) {
      // The store is late, or another thread waits on it.
    } catch (...) {
      return;
    }
  }
}

// The wrapper of a group that verifies forwards neither this nor `shutdown`: so the backends themselves are told.
void abort_all(const od_group& group) {
  group.group->end("aborted");
  if (group.is_shut_down) return;
  for (const auto& backend : group.backends) {
    overdrive::nccl_outlives_failures(*backend);
    backend->abort();
  }
}

// Flushes and frees the communicators. NCCL does that together with the other ranks, and has no limit: so it happens in a
// thread of its own, which is left behind if it has not ended at the deadline.
bool shut_down_by(const od_group& group, Clock::time_point deadline) {
  auto ended = std::make_shared<std::promise<void>>();
  auto future = ended->get_future();
  auto longest = std::min(LONGEST_HOLD, std::chrono::floor<std::chrono::milliseconds>((deadline - Clock::now()) / 2));
  std::thread([backends = group.backends, registrations = group.registrations, connections = group.connections, longest,
               ended]() mutable {
    std::exception_ptr failure;
    try {
      hold_until_connected(connections, longest);
      if (registrations) registrations->take_back_all();
      for (const auto& backend : backends) backend->shutdown();
    } catch (...) {
      failure = std::current_exception();
    }
    // Whoever waits has them too, and destroys them.
    backends.clear();
    failure ? ended->set_exception(failure) : ended->set_value();
  }).detach();
  if (future.wait_until(deadline) != std::future_status::ready) return false;
  future.get();
  return true;
}

// Call it when the group is idle: what was begun is done then.
void forget_connections(const od_group& group) {
  auto met = [](const auto& backend) { return overdrive::gloo_has_met(*backend); };
  if (group.group->failures()->any() || std::any_of(group.backends.begin(), group.backends.end(), met))
    group.connections.reset();
}

void close(const od_group& group, int64_t timeout_ms) {
  if (!group.group->end("closed")) return;
  auto deadline = Clock::now() + std::chrono::milliseconds(timeout_ms);
  if (!group.group->is_quiet_by(deadline) || !is_idle_by(group, deadline)) {
    abort_all(group);
    C10_THROW_ERROR(DistError, c10::str("timed out: work was under way after ", timeout_ms, " ms, and was aborted"));
  }
  group.is_shut_down = true;
  forget_connections(group);
  if (!shut_down_by(group, deadline))
    C10_THROW_ERROR(DistError, c10::str("timed out: communicators were not free after ", timeout_ms, " ms"));
  group.connections.reset();
}

c10d::BarrierOptions barrier_options(int64_t timeout_ms) {
  c10d::BarrierOptions options;
  options.timeout = std::chrono::milliseconds(timeout_ms);
  return options;
}

struct SumOverRanks : torch::autograd::Function<SumOverRanks> {
  static at::Tensor sum(const at::Tensor& tensor, ProcessGroup& group) {
    std::vector<at::Tensor> copies{tensor.detach().clone(at::MemoryFormat::Contiguous)};
    group.allreduce(copies)->wait();
    return copies[0];
  }

  static at::Tensor forward(torch::autograd::AutogradContext* context, const at::Tensor& tensor,
                            const c10::intrusive_ptr<ProcessGroup>& group) {
    context->saved_data["group"] = c10::IValue::make_capsule(group);
    return sum(tensor, *group);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* context,
                                                 torch::autograd::variable_list grads) {
    auto group = c10::static_intrusive_pointer_cast<ProcessGroup>(context->saved_data["group"].toCapsule());
    return {sum(grads[0], *group), at::Tensor()};
  }
};

}  // namespace

od_status od_group_new(const od_store* store, const od_group_options* options, od_group** out,
                       od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] {
    auto named = c10::make_intrusive<c10d::PrefixStore>(std::string(options->name) + "/", store->store);
    auto group = std::make_unique<od_group>();
    group->group = c10::make_intrusive<overdrive::OneAtATime>(named, options->rank, options->size);
    bool nccl = options->backend != OD_GLOO;
    group->group->setDefaultBackend(nccl ? ProcessGroup::BackendType::NCCL : ProcessGroup::BackendType::GLOO);
    if (nccl && options->cuda_device >= 0)
      group->group->setBoundDeviceId(at::Device(at::kCUDA, static_cast<at::DeviceIndex>(options->cuda_device)));
    if (options->backend != OD_NCCL)
      add_backend(*group, named, *options, at::kCPU, ProcessGroup::BackendType::GLOO);
    if (nccl) add_backend(*group, named, *options, at::kCUDA, ProcessGroup::BackendType::NCCL);
    group->group->setGroupName(options->name);
    group->verifies = options->verify != 0;
    if (nccl) group->registrations = overdrive::new_registrations();
    if (options->backend != OD_NCCL && options->size > 1) {
      group->connections = named;
      if (named->add(CONNECTED, 1) == options->size) named->set(ALL_CONNECTED, std::vector<uint8_t>());
    }
    *out = group.release();
  });
}

void od_group_free(od_group* group, int64_t timeout_ms) noexcept {
  if (group == nullptr) return;
  try {
    std::unique_ptr<od_group> owned(group);
    bool has_nccl = owned->group->getBackendType() == ProcessGroup::BackendType::NCCL;
    try {
      if (has_nccl && (timeout_ms <= 0 || owned->group->failures()->any())) abort_all(*owned);
      if (has_nccl) close(*owned, timeout_ms);
    } catch (...) {
    }
    bool idle = is_idle(*owned);
    if (idle || owned->group->failures()->any()) forget_connections(*owned);
    if (idle && !owned->connections) return;
    // The destructors wait for the work under way, which ends at its own timeout at the latest.
    std::thread([owned = std::move(owned)]() mutable {
      hold_until_connected(owned->connections);
      try {
        owned.reset();
      } catch (...) {
      }
    }).detach();
  } catch (...) {
  }
}

od_status od_group_split_none(const od_group* group, int32_t device, od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] { group->group->locked([&] { overdrive::split_none(*group, device); }); });
}

od_status od_group_close(const od_group* group, int64_t timeout_ms, od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] { close(*group, timeout_ms); });
}

od_status od_group_monitored_barrier(const od_group* group, int64_t timeout_ms, int32_t wait_all_ranks,
                                     od_error* err) noexcept {
  return overdrive::between_ranks(
      err, [&] { group->group->monitoredBarrier(barrier_options(timeout_ms), wait_all_ranks != 0); });
}

od_status od_group_broadcast_coalesced(const od_group* group, const od_tensor_list* tensors, int64_t bytes,
                                       int32_t root, od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] {
    auto list = overdrive::to_defined(tensors);
    if (list.empty()) return;
    at::NoGradGuard no_grad;
    c10d::broadcast_coalesced(group->group, list, static_cast<size_t>(bytes), root);
  });
}

od_status od_group_verify_params(const od_group* group, const od_tensor_list* params, od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] {
    auto list = overdrive::to_defined(params);
    TORCH_CHECK(!list.empty(), "there are no parameters to compare");
    c10d::verify_params_across_processes(group->group, list, std::nullopt);
  });
}

od_status od_group_set_timeout(const od_group* group, int64_t timeout_ms, od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] {
    group->group->between([&] {
      for (const auto& backend : group->backends) backend->setTimeout(std::chrono::milliseconds(timeout_ms));
    });
  });
}

od_status od_group_abort(const od_group* group, od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] { abort_all(*group); });
}

od_status od_group_failure(const od_group* group, int32_t* out, od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] {
    *out = 0;
    for (const auto& backend : group->backends)
      if (backend->getBackendName() == "nccl") *out = static_cast<int32_t>(backend->getError());
  });
}

od_status od_flight_record(int32_t nccl, int32_t only_active, char** out, od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] {
    auto record = nccl != 0 ? overdrive::nccl_record(only_active != 0) : c10d::dump_fr_trace_json(true, only_active != 0);
    *out = overdrive::copy_string(record.c_str());
  });
}

od_status od_group_sum_with_grad(const od_group* group, const at::Tensor* tensor, at::Tensor** out,
                                 od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] {
    TORCH_CHECK(tensor->defined(), "ranks cannot exchange an undefined tensor");
    *out = new at::Tensor(SumOverRanks::apply(*tensor, group->group));
  });
}
