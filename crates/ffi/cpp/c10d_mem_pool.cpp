// Pools of CUDA memory, and their registration at NCCL's communicators. Follows c10d_nccl.cpp, in the same file when
// compiled.
//
// libtorch's `registerMemPool` is not used. It notes pools by communicator in a table of the process. A communicator
// that ends in order stays there: memory of the pool that is freed later is to be deregistered from it, which throws in
// a destructor. One that is aborted is taken out, and `deregisterMemPool` then reads what is not there. Both end the
// process, by SIGABRT and SIGSEGV; so does PyTorch's `register_mem_pool`.
#include <ATen/cuda/MemPool.h>
#include <c10/core/AllocatorConfig.h>
#include <c10/cuda/CUDACachingAllocator.h>
#include <dlfcn.h>

#include <limits>
#include <list>
#include <map>

#include "c10d_registrations.h"
#include "cuda_device.h"

namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

struct Range {
  size_t begin, end;
};

struct Pool;

// The pools that are there, and the lock of what is noted of each. Never destroyed: the allocator calls until the
// process ends.
struct Pools {
  std::mutex mutex;
  std::map<c10::MempoolId_t, Pool*> by_id;
};
Pools& pools() {
  static auto* all = new Pools;
  return *all;
}

struct Pool {
  Pool(at::Device device, std::shared_ptr<allocator::CUDAAllocator> source)
      : device(device), has_source(source != nullptr) {
    c10::DeviceGuard guard(device);
    pool = new at::cuda::MemPool(std::move(source));
    std::lock_guard<std::mutex> lock(pools().mutex);
    pools().by_id[pool->id()] = this;
  }

  // Does what libtorch's destructor does, which would end the process where the device has failed. A pool is leaked
  // then, and where a scope uses it that was never ended.
  ~Pool() {
    try {
      {
        std::lock_guard<std::mutex> lock(pools().mutex);
        pools().by_id.erase(pool->id());
      }
      if (pool->use_count() != 1) return;
      c10::DeviceGuard guard(device);
      allocator::releasePool(device.index(), pool->id());
      allocator::emptyCache(pool->id());
    } catch (...) {
    }
  }

  at::Device device;
  // Not the caching allocator's own memory, which may be in expandable segments.
  bool has_source;
  at::cuda::MemPool* pool;
  // How often the system has given memory to the pool or got some back, and what it has got back.
  std::atomic<uint64_t> changes{0};
  std::vector<Range> freed;
};

// The allocator calls it and holds its lock. So it calls neither the allocator nor NCCL.
void note_change(const allocator::TraceEntry& entry) {
  using Action = allocator::TraceEntry::Action;
  bool freed = entry.action_ == Action::SEGMENT_FREE || entry.action_ == Action::SEGMENT_UNMAP;
  if (!freed && entry.action_ != Action::SEGMENT_ALLOC && entry.action_ != Action::SEGMENT_MAP) return;
  std::lock_guard<std::mutex> lock(pools().mutex);
  auto place = pools().by_id.find(entry.mempool_);
  if (place == pools().by_id.end()) return;
  if (freed) place->second->freed.push_back({entry.addr_, entry.addr_ + entry.size_});
  ++place->second->changes;
}

void watch_allocator() {
  static bool watched = [] {
    allocator::attachAllocatorTraceTracker(&note_change);
    return true;
  }();
  static_cast<void>(watched);
}

// NCCL's functions, of the library that libtorch has loaded.
struct Functions {
  ncclResult_t (*enter)(ncclComm_t, void*, size_t, void**);
  ncclResult_t (*leave)(ncclComm_t, void*);
};
const Functions& functions() {
  static Functions found{reinterpret_cast<decltype(Functions::enter)>(dlsym(RTLD_DEFAULT, "ncclCommRegister")),
                         reinterpret_cast<decltype(Functions::leave)>(dlsym(RTLD_DEFAULT, "ncclCommDeregister"))};
  TORCH_CHECK(found.enter != nullptr && found.leave != nullptr, "this libtorch hides NCCL's functions for memory");
  return found;
}

// A communicator, which ends on whatever thread finds that work has failed.
class Communicator {
 public:
  Communicator(std::shared_ptr<c10d::NCCLComm> owner, ncclComm_t comm, at::Device device)
      : owner_(std::move(owner)), comm_(comm), device_(device) {}

  // Runs a body during which it cannot end, on its device: NCCL would set a new thread's device back to GPU 0, which
  // makes a context there. False if it has ended.
  template <typename Body>
  bool with(Body&& body) const {
    c10::DeviceGuard guard(device_);
    std::lock_guard<std::recursive_mutex> lock(*owner_.*(&Open::mutex_));
    if (*owner_.*(&Open::aborted_)) return false;
    body(comm_);
    return true;
  }

 private:
  struct Open : c10d::NCCLComm {
    using c10d::NCCLComm::aborted_;
    using c10d::NCCLComm::mutex_;
  };
  std::shared_ptr<c10d::NCCLComm> owner_;
  ncclComm_t comm_;
  at::Device device_;
};

// A pool that is registered at a communicator. Where it is not taken back, it is kept for the rest of the process:
// other ranks may still read and write its memory.
class Registered {
 public:
  Registered(std::shared_ptr<Pool> pool, Communicator communicator)
      : pool_(std::make_unique<std::shared_ptr<Pool>>(std::move(pool))), communicator_(std::move(communicator)) {}
  Registered(const Registered&) = delete;
  ~Registered() {
    if (!is_taken_back_) static_cast<void>(pool_.release());
  }

  const Pool& pool() const { return **pool_; }

  // Registers memory that the pool has got, and takes back what it no longer has. After an error, the next call tries
  // again.
  void update() {
    const Pool& pool = this->pool();
    if (seen_ == pool.changes) return;
    uint64_t changes = 0;
    std::vector<Range> freed;
    {
      std::lock_guard<std::mutex> lock(pools().mutex);
      changes = pool.changes;
      freed.assign(pool.freed.begin() + static_cast<std::ptrdiff_t>(freed_seen_), pool.freed.end());
    }
    bool grows = !pool.has_source && c10::CachingAllocator::AcceleratorAllocatorConfig::use_expandable_segments();
    std::map<size_t, size_t> there;
    for (const auto& segment : allocator::snapshot(pool.pool->id(), false).segments) {
      if (segment.device != pool.device.index() || segment.total_size == 0) continue;
      grows = grows || segment.is_expandable;
      there[segment.address] = segment.total_size;
    }
    TORCH_CHECK(!grows, "a pool in expandable segments cannot be registered, because they grow while NCCL uses them: "
                        "set expandable_segments:False in PYTORCH_CUDA_ALLOC_CONF");
    auto result = ncclSuccess;
    communicator_.with([&](ncclComm_t comm) {
      for (auto it = segments_.begin(); it != segments_.end();) {
        auto [begin, segment] = *it;
        auto overlaps = [&, end = begin + segment.size, begin = begin](const Range& range) {
          return range.begin < end && begin < range.end;
        };
        auto place = there.find(begin);
        bool stays =
            place != there.end() && place->second == segment.size && std::none_of(freed.begin(), freed.end(), overlaps);
        it = stays ? std::next(it) : leave(comm, it, result);
      }
      for (auto [begin, size] : there) {
        if (segments_.count(begin) != 0) continue;
        void* handle = nullptr;
        auto code = functions().enter(comm, reinterpret_cast<void*>(begin), size, &handle);
        note(result, code);
        if (code == ncclSuccess) segments_[begin] = {size, handle};
      }
    });
    TORCH_CHECK(result == ncclSuccess, "NCCL did not register the pool: ", c10d::ncclGetErrorWithVersion(result));
    seen_ = changes;
    freed_seen_ += freed.size();
  }

  // Takes all memory back: it may be freed. What NCCL refuses stays, and the next update registers the rest again.
  void take_back() {
    auto result = ncclSuccess;
    seen_ = NOTHING;
    bool there = communicator_.with([&](ncclComm_t comm) {
      for (auto it = segments_.begin(); it != segments_.end();) it = leave(comm, it, result);
    });
    TORCH_CHECK(there, "the communicator has ended: the pool is kept for the rest of the process");
    TORCH_CHECK(result == ncclSuccess, "NCCL did not give the pool back: ", c10d::ncclGetErrorWithVersion(result));
    is_taken_back_ = true;
  }

  // The same where nobody can do anything about an error.
  void try_to_take_back() noexcept {
    try {
      take_back();
    } catch (...) {
    }
  }

 private:
  struct Segment {
    size_t size;
    void* handle;
  };
  using Segments = std::map<size_t, Segment>;

  static constexpr uint64_t NOTHING = std::numeric_limits<uint64_t>::max();

  // Gives a segment back, unless NCCL refuses, and returns the next one.
  Segments::iterator leave(ncclComm_t comm, Segments::iterator it, ncclResult_t& result) {
    auto code = functions().leave(comm, it->second.handle);
    note(result, code);
    return code == ncclSuccess ? segments_.erase(it) : std::next(it);
  }

  static void note(ncclResult_t& result, ncclResult_t code) {
    if (result == ncclSuccess) result = code;
  }

  std::unique_ptr<std::shared_ptr<Pool>> pool_;
  Communicator communicator_;
  bool is_taken_back_ = false;
  Segments segments_;
  // What of the pool's changes was seen. The first look sees all.
  uint64_t seen_ = NOTHING;
  size_t freed_seen_ = 0;
};

class NcclRegistrations final : public overdrive::Registrations {
 public:
  void add(const std::shared_ptr<Pool>& pool, Communicator communicator) {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(find(*pool) == all_.end(), "the pool is registered already");
    watch_allocator();
    functions();
    std::list<Registered> added;
    added.emplace_back(pool, std::move(communicator));
    try {
      added.back().update();
    } catch (...) {
      added.back().try_to_take_back();
      throw;
    }
    all_.splice(all_.end(), added);
  }

  // Where only some ranks' memory is registered, NCCL may wait without a limit. So a failure is one of the collective.
  void update() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto& registered : all_) registered.update();
  }

  void check_has(const Pool& pool) {
    std::lock_guard<std::mutex> lock(mutex_);
    TORCH_CHECK(find(pool) != all_.end(), "the pool is not registered at this group");
  }

  // The pool is freed by whoever drops it last.
  void take_back(const Pool& pool) {
    std::list<Registered> taken;
    std::lock_guard<std::mutex> lock(mutex_);
    auto place = find(pool);
    TORCH_CHECK(place != all_.end(), "the pool is not registered at this group");
    place->take_back();
    taken.splice(taken.end(), all_, place);
  }

  void take_back_all() override {
    std::list<Registered> taken;
    std::lock_guard<std::mutex> lock(mutex_);
    taken.swap(all_);
    for (auto& registered : taken) registered.try_to_take_back();
  }

 private:
  std::list<Registered>::iterator find(const Pool& pool) {
    return std::find_if(all_.begin(), all_.end(), [&](const Registered& it) { return &it.pool() == &pool; });
  }

  std::mutex mutex_;
  std::list<Registered> all_;
};

NcclRegistrations& registrations_of(const od_group& group) {
  return static_cast<NcclRegistrations&>(*group.registrations);
}

void check_device(const Nccl& nccl, at::Device device) {
  auto bound = nccl.getBoundDeviceId();
  TORCH_CHECK(!bound || *bound == device, "the pool is on CUDA device ", static_cast<int>(device.index()),
              ", and the group on device ", static_cast<int>(bound->index()));
}

std::shared_ptr<allocator::CUDAAllocator> source_of(const od_group& group) {
  auto source = std::dynamic_pointer_cast<allocator::CUDAAllocator>(nccl_of(group)->getMemAllocator());
  TORCH_CHECK(source, "this NCCL allocates no memory");
  return source;
}

}  // namespace

std::shared_ptr<overdrive::Registrations> overdrive::new_registrations() {
  return std::make_shared<NcclRegistrations>();
}

struct od_mem_pool {
  std::shared_ptr<Pool> pool;
};

od_status od_mem_pool_new(int32_t device, const od_group* nccl, od_mem_pool** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto source = nccl == nullptr ? nullptr : source_of(*nccl);
    *out = new od_mem_pool{std::make_shared<Pool>(overdrive::cuda_device(device), std::move(source))};
  });
}

void od_mem_pool_free(od_mem_pool* pool) noexcept { delete pool; }

od_status od_mem_pool_begin(const od_mem_pool* pool, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto own = std::this_thread::get_id();
    auto device = pool->pool->device.index();
    auto id = pool->pool->pool->id();
    try {
      allocator::beginAllocateToPool(device, id, [own](cudaStream_t) { return std::this_thread::get_id() == own; });
    } catch (...) {
      // It has counted the scope before it looked whether there is one already.
      allocator::releasePool(device, id);
      throw;
    }
  });
}

void od_mem_pool_end(const od_mem_pool* pool) noexcept {
  try {
    allocator::endAllocateToPool(pool->pool->device.index(), pool->pool->pool->id());
    allocator::releasePool(pool->pool->device.index(), pool->pool->pool->id());
  } catch (...) {
  }
}

od_status od_group_register_pool(const od_group* group, const od_mem_pool* pool, od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] {
    auto nccl = nccl_of(*group);
    auto device = pool->pool->device;
    check_device(*nccl, device);
    TORCH_CHECK(!nccl->waits_itself(), "with TORCH_NCCL_BLOCKING_WAIT=1 nobody knows when NCCL no longer uses a pool: "
                                       "unset it to register one");
    group->group->between([&] {
      auto [owner, comm] = nccl->communicator(device);
      registrations_of(*group).add(pool->pool, {std::move(owner), comm, device});
      // The group may outlive its handle.
      group->group->before_each = [all = group->registrations] { static_cast<NcclRegistrations&>(*all).update(); };
    });
  });
}

od_status od_group_deregister_pool(const od_group* group, const od_mem_pool* pool, od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] {
    auto nccl = nccl_of(*group);
    group->group->between([&] {
      auto& registrations = registrations_of(*group);
      registrations.check_has(*pool->pool);
      nccl->wait_until_idle(*group->group->failures());
      registrations.take_back(*pool->pool);
    });
  });
}
