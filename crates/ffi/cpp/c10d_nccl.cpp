// NCCL, where libtorch has CUDA and its headers and NCCL's are found.
#define USE_C10D_NCCL 1

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include <algorithm>
#include <chrono>
#include <thread>

#include "c10d_backends.h"
#include "c10d_guarded.h"

int32_t od_nccl_compiled(void) noexcept { return 1; }

namespace {

struct Nccl final : c10d::ProcessGroupNCCL {
  using c10d::ProcessGroupNCCL::ProcessGroupNCCL;

  bool idle() {
    // Then no watchdog runs, which alone empties the list; the communicator's end flushes it.
    if (blockingWait_) return true;
    // The watchdog holds the lock for a minute once work has failed.
    std::unique_lock<std::mutex> lock(workMetaListMutex_, std::try_to_lock);
    return lock.owns_lock() && workMetaList_.empty();
  }

  // `idle` does not know then.
  bool waits_itself() const { return blockingWait_; }

  // Connects its ranks, as a split needs.
  void connect(at::Device device) {
    if (!isInitialized()) eagerConnectSingleDevice(device);
  }

  // That of a device, which waits for its ranks where it is not there yet.
  std::pair<std::shared_ptr<c10d::NCCLComm>, ncclComm_t> communicator(at::Device device) {
    connect(device);
    c10::DeviceGuard guard(device);
    auto* ready = reinterpret_cast<ncclComm_t>(getCommPtr());
    auto owner = getNCCLComm(std::to_string(device.index()));
    TORCH_CHECK(ready != nullptr && owner != nullptr, "the group has no communicator on ", device);
    return {std::move(owner), ready};
  }

  void wait_until_idle(const overdrive::Failures& failures) {
    auto deadline = std::chrono::steady_clock::now() + options_->timeout;
    while (!idle()) {
      TORCH_CHECK(!failures.any(), "work of the group has failed");
      TORCH_CHECK(std::chrono::steady_clock::now() < deadline, "timed out: the group's work was not done after ",
                  options_->timeout.count(), " ms");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
  }

  void outlive_failures() { asyncErrorHandling_ = c10d::NoHandling; }
};

c10::intrusive_ptr<Nccl> nccl_of(const od_group& group) {
  // Not `dynamic_intrusive_pointer_cast`: where the cast fails, it keeps a reference for ever.
  for (const auto& backend : group.backends)
    if (dynamic_cast<Nccl*>(backend.get())) return c10::static_intrusive_pointer_cast<Nccl>(backend);
  TORCH_CHECK(false, "only a group over NCCL has a communicator, to split it or to register memory");
}

at::Device cuda(int32_t number) { return {at::kCUDA, static_cast<c10::DeviceIndex>(number)}; }

}  // namespace

namespace overdrive {

c10::intrusive_ptr<c10d::Backend> new_nccl(const c10::intrusive_ptr<c10d::Store>& store,
                                           const od_group_options& options) {
  auto nccl = c10d::ProcessGroupNCCL::Options::create(options.high_priority != 0);
  nccl->timeout = std::chrono::milliseconds(options.timeout_ms);
  nccl->group_name = options.name;
  nccl->global_ranks_in_group.assign(options.global_ranks, options.global_ranks + options.size);
  auto make = [&] { return c10::make_intrusive<Nccl>(store, options.rank, options.size, nccl); };
  // The other ranks of the parent take part in a split at this time, in the order of its collectives.
  auto split = [&] {
    auto parent = nccl_of(*options.split_from);
    parent->connect(cuda(options.cuda_device));
    nccl->split_from = parent;
    nccl->split_color = options.color;
    auto backend = make();
    backend->connect(cuda(options.cuda_device));
    return backend;
  };
  auto backend = options.split_from == nullptr ? make() : options.split_from->group->locked(split);
  backend->setSequenceNumberForGroup();
  return backend;
}

void split_none(const od_group& group, int32_t device) {
  auto parent = nccl_of(group);
  parent->connect(cuda(device));
  parent->performNocolorSplit(cuda(device));
}

bool nccl_is_idle(c10d::Backend& backend) {
  auto* nccl = dynamic_cast<Nccl*>(&backend);
  return nccl == nullptr || nccl->idle();
}

void nccl_outlives_failures(c10d::Backend& backend) {
  if (auto* nccl = dynamic_cast<Nccl*>(&backend)) nccl->outlive_failures();
}

std::string nccl_record(bool only_active) { return c10d::dump_nccl_trace_json(true, only_active); }

}  // namespace overdrive
