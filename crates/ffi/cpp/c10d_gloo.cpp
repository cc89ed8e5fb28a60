// The only file that includes gloo's declarations (gloo_decls/README.md has the rules for using them).
#define USE_C10D_GLOO 1

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupWrapper.hpp>
#include <torch/headeronly/version.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <future>
#include <mutex>
#include <sstream>
#include <thread>

#include "c10d_backends.h"

static_assert(TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR == 11,
              "gloo_decls mirrors libtorch 2.11: see its README.md");

namespace {

struct Gloo final : c10d::ProcessGroupGloo {
  using c10d::ProcessGroupGloo::ProcessGroupGloo;
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;

  // libtorch's flight recorder keeps the groups in a map, which a group's first collective writes to without a lock. So
  // collectives of all groups start one at a time. That blocks no thread for long, because Gloo only queues them.
  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return registered([&] { return ProcessGroupGloo::broadcast(tensors, options); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return of_all(has_numbers(tensors), [&] { return ProcessGroupGloo::allreduce(tensors, options); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return of_all(has_numbers(tensors), [&] { return ProcessGroupGloo::allreduce_coalesced(tensors, options); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return registered([&] { return ProcessGroupGloo::reduce(tensors, options); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    return of_all(in.numel() > 0, [&] { return ProcessGroupGloo::_reduce_scatter_base(out, in, options); });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    return of_all(in.numel() > 0, [&] { return ProcessGroupGloo::_allgather_base(out, in, options); });
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    return of_all(has_numbers(in), [&] { return ProcessGroupGloo::allgather(out, in, options); });
  }
  WorkPtr allgather_coalesced(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    return of_all(has_numbers(in), [&] { return ProcessGroupGloo::allgather_coalesced(out, in, options); });
  }
  WorkPtr allgather_into_tensor_coalesced(Tensors& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    return of_all(has_numbers(in), [&] { return ProcessGroupGloo::allgather_into_tensor_coalesced(out, in, options); });
  }
  WorkPtr gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override {
    return registered([&] { return ProcessGroupGloo::gather(out, in, options); });
  }
  WorkPtr scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
    return registered([&] { return ProcessGroupGloo::scatter(out, in, options); });
  }
  WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) override {
    return of_all(has_numbers(out), [&] { return ProcessGroupGloo::reduce_scatter(out, in, options); });
  }
  WorkPtr reduce_scatter_tensor_coalesced(Tensors& out, Tensors& in, const c10d::ReduceScatterOptions& options) override {
    return of_all(has_numbers(in), [&] { return ProcessGroupGloo::reduce_scatter_tensor_coalesced(out, in, options); });
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, std::vector<int64_t>& out_splits,
                        std::vector<int64_t>& in_splits, const c10d::AllToAllOptions& options) override {
    // A member may have nothing for another one.
    bool is_even = out_splits.empty() && in_splits.empty();
    return of_all(is_even && in.numel() > 0,
                  [&] { return ProcessGroupGloo::alltoall_base(out, in, out_splits, in_splits, options); });
  }
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    return of_all(true, [&] { return ProcessGroupGloo::barrier(options); });
  }

  // A group that verifies compares how many operations each rank has begun. Gloo counts sends and receives too, but
  // ranks may run different numbers of these, and do in a monitored barrier: so they are not counted here.
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return uncounted([&] { return ProcessGroupGloo::send(tensors, to, tag); });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return uncounted([&] { return ProcessGroupGloo::recv(tensors, from, tag); });
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return uncounted([&] { return ProcessGroupGloo::recvAnysource(tensors, tag); });
  }

  bool idle() {
    std::lock_guard<std::mutex> lock(workMutex_);
    if (!workQueue_.empty()) return false;
    // A worker releases its work a moment after it is done.
    return std::all_of(workInProgress_.begin(), workInProgress_.end(),
                       [](const auto& work) { return !work || work->isCompleted(); });
  }

  // Whether a collective was begun in which each member hears of all others.
  bool has_met() const { return has_met_; }

 private:
  // `meets`: without numbers, Gloo may return before the members have heard of each other.
  template <typename Body>
  WorkPtr of_all(bool meets, Body&& body) {
    auto work = registered(body);
    // Not one that was refused.
    if (meets) has_met_ = true;
    return work;
  }

  static bool has_numbers(const Tensors& tensors) {
    return std::any_of(tensors.begin(), tensors.end(), [](const auto& tensor) { return tensor.numel() > 0; });
  }

  template <typename Body>
  static WorkPtr registered(Body&& body) {
    // Recursive, because some operations call others. Never destroyed: detached threads may outlive static variables.
    static auto* one_at_a_time = new std::recursive_mutex();
    std::lock_guard<std::recursive_mutex> lock(*one_at_a_time);
    return body();
  }

  template <typename Body>
  WorkPtr uncounted(Body&& body) {
    return registered([&] {
      auto counted = seq_;
      auto work = body();
      seq_ = counted;
      return work;
    });
  }

  std::atomic<bool> has_met_{false};
};

// Gloo waits five times the timeout for a first connection, for example to a member that has published its address and
// then died. So it connects on a thread that ends by itself, and the caller gets an error after the timeout, which leaves
// Gloo and the store a moment to say what is missing.
c10::intrusive_ptr<Gloo> connected(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                   const c10::intrusive_ptr<c10d::ProcessGroupGloo::Options>& options) {
  auto made = std::make_shared<std::promise<c10::intrusive_ptr<Gloo>>>();
  auto backend = made->get_future();
  std::thread([=] {
    try {
      made->set_value(c10::make_intrusive<Gloo>(store, rank, size, options));
    } catch (...) {
      made->set_exception(std::current_exception());
    }
  }).detach();
  constexpr std::chrono::seconds kGrace{5};
  if (backend.wait_for(options->timeout + kGrace) != std::future_status::ready)
    C10_THROW_ERROR(DistNetworkError, c10::str("timed out: no connection to every member after ",
                                               options->timeout.count(), " ms"));
  return backend.get();
}

}  // namespace

namespace overdrive {

c10::intrusive_ptr<c10d::Backend> new_gloo(const c10::intrusive_ptr<c10d::Store>& store,
                                           const od_group_options& options) {
  auto gloo = c10d::ProcessGroupGloo::Options::create(std::chrono::milliseconds(options.timeout_ms));
  bool lazy = c10d::getDefaultGlooLazyInit();
  const char* interfaces = std::getenv("GLOO_SOCKET_IFNAME");
  std::stringstream names(interfaces == nullptr ? "" : interfaces);
  for (std::string name; std::getline(names, name, ',');)
    gloo->devices.push_back(c10d::ProcessGroupGloo::createDeviceForInterface(name, lazy));
  if (gloo->devices.empty())
    gloo->devices.push_back(options.one_host != 0 ? c10d::ProcessGroupGloo::createDeviceForHostname("127.0.0.1", lazy)
                                                  : c10d::ProcessGroupGloo::createDefaultDevice(lazy));
  gloo->threads = static_cast<int>(gloo->devices.size()) * 2;
  gloo->group_name = options.name;
  gloo->global_ranks_in_group.assign(options.global_ranks, options.global_ranks + options.size);
  auto backend = connected(store, options.rank, options.size, gloo);
  backend->setSequenceNumberForGroup();
  return backend;
}

c10::intrusive_ptr<c10d::Backend> verified(const c10::intrusive_ptr<c10d::Backend>& backend,
                                           const c10::intrusive_ptr<c10d::Backend>& helper) {
  return c10::make_intrusive<c10d::ProcessGroupWrapper>(backend, helper);
}

bool gloo_has_met(c10d::Backend& backend) {
  auto* gloo = dynamic_cast<Gloo*>(&backend);
  return gloo != nullptr && gloo->has_met();
}

bool gloo_is_idle(c10d::Backend& backend) {
  auto* gloo = dynamic_cast<Gloo*>(&backend);
  return gloo == nullptr || gloo->idle();
}

}  // namespace overdrive
