// The only file that sees gloo's declarations (gloo_decls/README.md says what may be done with them).
#define USE_C10D_GLOO 1

#include <torch/csrc/distributed/c10d/ProcessGroupGloo.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroupWrapper.hpp>
#include <torch/headeronly/version.h>

#include <cstdlib>
#include <future>
#include <sstream>
#include <thread>

#include "c10d_backends.h"

static_assert(TORCH_VERSION_MAJOR == 2 && TORCH_VERSION_MINOR == 11,
              "gloo_decls mirrors libtorch 2.11: see its README.md");

namespace {

struct Gloo final : c10d::ProcessGroupGloo {
  using c10d::ProcessGroupGloo::ProcessGroupGloo;

  // A group that verifies compares how many operations each rank has begun, and Gloo counts sends and receives among
  // them: ranks may differ in these, and do in a monitored barrier.
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    return uncounted([&] { return c10d::ProcessGroupGloo::send(tensors, to, tag); });
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    return uncounted([&] { return c10d::ProcessGroupGloo::recv(tensors, from, tag); });
  }
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override {
    return uncounted([&] { return c10d::ProcessGroupGloo::recvAnysource(tensors, tag); });
  }

  bool idle() {
    std::lock_guard<std::mutex> lock(workMutex_);
    if (!workQueue_.empty()) return false;
    // A worker lets go of its work a moment after that is done.
    return std::all_of(workInProgress_.begin(), workInProgress_.end(),
                       [](const auto& work) { return !work || work->isCompleted(); });
  }

 private:
  template <typename Body>
  c10::intrusive_ptr<c10d::Work> uncounted(Body&& body) {
    auto counted = seq_;
    auto work = body();
    seq_ = counted;
    return work;
  }
};

// Gloo waits five times as long as it was told to for a first connection, from a member that has told its address and
// is gone, say. Whoever waits here is told in time, and the thread ends by itself.
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
  if (backend.wait_for(options->timeout) != std::future_status::ready)
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

bool gloo_is_idle(c10d::Backend& backend) {
  auto* gloo = dynamic_cast<Gloo*>(&backend);
  return gloo == nullptr || gloo->idle();
}

}  // namespace overdrive
