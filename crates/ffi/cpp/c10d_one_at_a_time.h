#pragma once

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <mutex>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

namespace overdrive {

// What is known of a group's work: works share it, and may outlive the group.
struct Failures {
  // A collective has failed between ranks.
  std::atomic<bool> failed{false};
  // Works that are not done, for which somebody no longer waits.
  std::atomic<int64_t> given_up{0};
  bool any() const { return failed || given_up > 0; }
};

// A group that starts one collective at a time, from any thread: Gloo and NCCL count collectives without a lock, and
// the threads that run backward passes start some too. Waiting for a collective takes no lock.
class OneAtATime final : public c10d::ProcessGroup {
 public:
  using Tensors = std::vector<at::Tensor>;
  using WorkPtr = c10::intrusive_ptr<c10d::Work>;
  using Sizes = std::vector<int64_t>;
  using c10d::ProcessGroup::ProcessGroup;

  // Starts a collective.
  template <typename Body>
  auto locked(Body&& body) {
    return between([&] {
      prepare();
      return body();
    });
  }

  // While no collective starts.
  template <typename Body>
  auto between(Body&& body) {
    std::lock_guard<std::timed_mutex> lock(starting_);
    if (const char* how = ended_) C10_THROW_ERROR(DistError, c10::str("the group was ", how, ": make a new one"));
    try {
      return body();
    } catch (const c10::DistError&) {
      failures_->failed = true;
      throw;
    }
  }

  // From here on, every collective is an error. False if the group had ended before. Takes no lock: another thread may
  // hold it that waits for a rank.
  bool end(const char* how) {
    const char* not_yet = nullptr;
    return ended_.compare_exchange_strong(not_yet, how);
  }

  // Waits until no thread is starting a collective; after `end`, none begins to.
  bool is_quiet_by(std::chrono::steady_clock::time_point deadline) {
    if (!starting_.try_lock_until(deadline)) return false;
    starting_.unlock();
    return true;
  }

  const std::shared_ptr<Failures>& failures() const { return failures_; }

  WorkPtr broadcast(Tensors& tensors, const c10d::BroadcastOptions& options) override {
    return locked([&] { return ProcessGroup::broadcast(tensors, options); });
  }
  WorkPtr allreduce(Tensors& tensors, const c10d::AllreduceOptions& options) override {
    return locked([&] { return ProcessGroup::allreduce(tensors, options); });
  }
  WorkPtr allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& options) override {
    return locked([&] { return ProcessGroup::allreduce_coalesced(tensors, options); });
  }
  WorkPtr reduce(Tensors& tensors, const c10d::ReduceOptions& options) override {
    return locked([&] { return ProcessGroup::reduce(tensors, options); });
  }
  WorkPtr allgather(std::vector<Tensors>& out, Tensors& in, const c10d::AllgatherOptions& options) override {
    return locked([&] { return ProcessGroup::allgather(out, in, options); });
  }
  WorkPtr _allgather_base(at::Tensor& out, at::Tensor& in, const c10d::AllgatherOptions& options) override {
    return locked([&] { return ProcessGroup::_allgather_base(out, in, options); });
  }
  WorkPtr gather(std::vector<Tensors>& out, Tensors& in, const c10d::GatherOptions& options) override {
    return locked([&] { return ProcessGroup::gather(out, in, options); });
  }
  WorkPtr scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ScatterOptions& options) override {
    return locked([&] { return ProcessGroup::scatter(out, in, options); });
  }
  WorkPtr reduce_scatter(Tensors& out, std::vector<Tensors>& in, const c10d::ReduceScatterOptions& options) override {
    return locked([&] { return ProcessGroup::reduce_scatter(out, in, options); });
  }
  WorkPtr _reduce_scatter_base(at::Tensor& out, at::Tensor& in, const c10d::ReduceScatterOptions& options) override {
    return locked([&] { return ProcessGroup::_reduce_scatter_base(out, in, options); });
  }
  WorkPtr alltoall_base(at::Tensor& out, at::Tensor& in, Sizes& out_splits, Sizes& in_splits,
                        const c10d::AllToAllOptions& options) override {
    return locked([&] { return ProcessGroup::alltoall_base(out, in, out_splits, in_splits, options); });
  }
  WorkPtr alltoall(Tensors& out, Tensors& in, const c10d::AllToAllOptions& options) override {
    return locked([&] { return ProcessGroup::alltoall(out, in, options); });
  }
  WorkPtr send(Tensors& tensors, int to, int tag) override {
    return locked([&] { return ProcessGroup::send(tensors, to, tag); });
  }
  WorkPtr recv(Tensors& tensors, int from, int tag) override {
    return locked([&] { return ProcessGroup::recv(tensors, from, tag); });
  }
  WorkPtr recvAnysource(Tensors& tensors, int tag) override {
    return locked([&] { return ProcessGroup::recvAnysource(tensors, tag); });
  }
  // libtorch's barrier keeps its tensor in a static variable, which threads of two groups would write to at once.
  WorkPtr barrier(const c10d::BarrierOptions& options) override {
    static auto op = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("c10d::barrier", "")
                         .typed<WorkPtr(at::Tensor, const c10::intrusive_ptr<c10d::ProcessGroup>&, const Sizes&, bool,
                                        int64_t)>();
    bool nccl = getBackendType() == BackendType::NCCL;
    auto device = options.device.value_or(nccl ? at::kCUDA : at::kCPU);
    auto picks_device = at::empty({1}, at::TensorOptions().device(device).dtype(at::kByte));
    auto self = c10::intrusive_ptr<c10d::ProcessGroup>::unsafe_reclaim_from_nonowning(this);
    return locked([&] { return op.call(picks_device, self, options.device_ids, options.asyncOp, options.timeout.count()); });
  }
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks) override {
    locked([&] { ProcessGroup::monitoredBarrier(options, wait_all_ranks); });
  }

  // What happens before each collective. Set where none can begin.
  std::function<void()> before_each;

 private:
  // The other ranks begin the collective, also where this one fails.
  void prepare() {
    try {
      if (before_each) before_each();
    } catch (...) {
      failures_->failed = true;
      throw;
    }
  }

  std::timed_mutex starting_;
  std::atomic<const char*> ended_{nullptr};
  std::shared_ptr<Failures> failures_ = std::make_shared<Failures>();
};

}  // namespace overdrive
