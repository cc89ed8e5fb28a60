// A CPU allocator that keeps freed blocks for the next allocations, and one that counts and limits the memory of
// tensors, as the CUDA allocator does. It is a single allocator, because both work on the same blocks.
//
// malloc may return a large freed block to the system, depending on the state of its heap; the next block then costs a
// page fault every 4 KiB. Gradients are freed and allocated in every step.
#include <algorithm>
#include <atomic>
#include <mutex>
#include <unordered_map>
#include <vector>

#ifdef __GLIBC__
#include <malloc.h>
#endif

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include "allocations.h"
#include "guarded.h"
#include "huge_pages.h"
#include "mapped_files.h"

namespace {

// Smaller blocks are left to malloc, which is good at them.
constexpr size_t kSmallest = 256 << 10;
constexpr size_t kGranularity = 64 << 10;

class HostAllocator final : public c10::Allocator {
 public:
  // Replaces the current allocator, which still serves small blocks and frees its own.
  void install() {
    std::call_once(installed_, [&] {
      before_ = c10::GetCPUAllocator();
      c10::SetCPUAllocator(this);
    });
  }

  c10::DataPtr allocate(size_t bytes) override {
    int folder = overdrive::folder_for_tensors();
    if (folder >= 0 && bytes >= kSmallest) return in_file(folder, bytes);
    bool counts = counts_.load();
    bool is_watched = overdrive::is_watched();
    if (bytes < kSmallest && !counts && !is_watched) return before_->allocate(bytes);
    // An empty tensor has no block.
    if (bytes == 0) return {nullptr, nullptr, &give_back, c10::Device(c10::kCPU)};
    size_t counted = counts ? bytes : 0;
    reserve(counted);
    void* data = nullptr;
    try {
      data = lend(bytes, counted);
    } catch (...) {
      std::lock_guard<std::mutex> lock(mutex_);
      stats_.allocated -= counted;
      throw;
    }
    if (is_watched) overdrive::report(OD_ALLOCATED, data, bytes, -1);
    return {data, data, &give_back, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  void set_kept(size_t limit) {
    std::lock_guard<std::mutex> lock(mutex_);
    kept_limit_ = limit;
    shrink();
  }

  size_t kept() {
    std::lock_guard<std::mutex> lock(mutex_);
    return kept_;
  }

  // From now on blocks are counted, and no more than `limit` bytes lent.
  void count(size_t limit) {
    std::lock_guard<std::mutex> lock(mutex_);
    counts_ = true;
    limit_ = limit;
  }

  od_host_memory stats() {
    std::lock_guard<std::mutex> lock(mutex_);
    return stats_;
  }

  void reset_peak() {
    std::lock_guard<std::mutex> lock(mutex_);
    stats_.peak = stats_.allocated;
  }

 private:
  struct Free {
    void* data;
    size_t bytes;
  };

  struct Lent {
    size_t bytes;
    size_t asked;
    bool is_counted;
    bool is_file;
  };

  static void give_back(void* data);

  // Counts a block before there is one, so that threads cannot exceed the limit together.
  void reserve(size_t counted) {
    if (counted == 0) return;
    std::lock_guard<std::mutex> lock(mutex_);
    if (counted > limit_ || stats_.allocated > limit_ - counted) {
      ++stats_.refused;
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CPU out of memory. Tried to allocate ", counted, " bytes, where tensors have ",
                       stats_.allocated, " bytes and may have ", limit_);
    }
    stats_.allocated += counted;
    stats_.peak = std::max(stats_.peak, stats_.allocated);
    ++stats_.allocations;
  }

  void* lend(size_t bytes, size_t counted) {
    bool is_small = bytes < kSmallest;
    Free block = is_small ? Free{before_->raw_allocate(bytes), bytes} : find(bytes);
    if (block.data == nullptr) block = make(bytes);
    try {
      std::lock_guard<std::mutex> lock(mutex_);
      lent_.emplace(block.data, Lent{block.bytes, bytes, counted != 0, false});
    } catch (...) {
      free_block(block.data, block.bytes);
      throw;
    }
    // The allocator that was there before reports its blocks itself.
    if (!is_small) c10::profiledCPUMemoryReporter().New(block.data, bytes);
    return block.data;
  }

  // A block on the disk is neither counted nor watched, because it takes no memory.
  c10::DataPtr in_file(int folder, size_t bytes) {
    void* data = overdrive::map_file(folder, bytes);
    try {
      std::lock_guard<std::mutex> lock(mutex_);
      lent_.emplace(data, Lent{bytes, bytes, false, true});
    } catch (...) {
      overdrive::unmap_file(data, bytes);
      throw;
    }
    return {data, data, &give_back, c10::Device(c10::kCPU)};
  }

  void free_block(void* data, size_t bytes) { bytes < kSmallest ? before_->raw_deallocate(data) : c10::free_cpu(data); }

  // The newest block that fits without wasting a quarter: the block freed last may still be in the processor's cache.
  Free find(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto fits = [&](const Free& block) { return block.bytes >= bytes && block.bytes / 5 * 4 <= bytes; };
    auto found = std::find_if(free_.rbegin(), free_.rend(), fits);
    if (found == free_.rend()) return {nullptr, 0};
    auto block = *found;
    free_.erase(std::next(found).base());
    kept_ -= block.bytes;
    return block;
  }

  Free make(size_t bytes) {
    bytes = (bytes + kGranularity - 1) / kGranularity * kGranularity;
    void* data = nullptr;
    try {
      data = c10::alloc_cpu(bytes);
    } catch (const c10::Error&) {
      if (kept() == 0) throw;
      drop_all();
      data = c10::alloc_cpu(bytes);
    }
    overdrive::advise_huge_pages(data, bytes);
    return {data, bytes};
  }

  // oneDNN allocates with the current allocator and frees with a later one, passing only the address. So a block that
  // was not lent here is older than this allocator, or small.
  void take_back(void* data) {
    if (data == nullptr) return;
    std::unique_lock<std::mutex> lock(mutex_);
    auto found = lent_.find(data);
    if (found == lent_.end()) {
      lock.unlock();
      return before_->raw_deallocate(data);
    }
    if (found->second.is_file) {
      size_t bytes = found->second.bytes;
      lent_.erase(found);
      lock.unlock();
      return overdrive::unmap_file(data, bytes);
    }
    // Reported before another thread can get the block.
    overdrive::report(OD_FREED, data, found->second.asked, -1);
    Free block{data, found->second.bytes};
    if (found->second.is_counted) stats_.allocated -= found->second.asked;
    lent_.erase(found);
    bool is_small = block.bytes < kSmallest;
    // Reported before another thread can get the block.
    if (!is_small) c10::profiledCPUMemoryReporter().Delete(data);
    // A block above the limit would evict all others, and then itself.
    bool keeps = !is_small && block.bytes <= kept_limit_;
    try {
      if (keeps) free_.push_back(block);
    } catch (const std::bad_alloc&) {
      keeps = false;
    }
    if (keeps) {
      kept_ += block.bytes;
      shrink();
    }
    lock.unlock();
    if (!keeps) free_block(data, block.bytes);
  }

  void drop_all() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& block : free_) c10::free_cpu(block.data);
    free_.clear();
    kept_ = 0;
  }

  // Frees the blocks that were freed longest ago.
  void shrink() {
    auto keep = free_.begin();
    for (; kept_ > kept_limit_ && keep != free_.end(); ++keep) {
      kept_ -= keep->bytes;
      c10::free_cpu(keep->data);
    }
    free_.erase(free_.begin(), keep);
  }

  std::once_flag installed_;
  c10::Allocator* before_ = nullptr;
  std::mutex mutex_;
  std::unordered_map<void*, Lent> lent_;
  std::vector<Free> free_;  // in the order in which they were freed
  size_t kept_ = 0;
  size_t kept_limit_ = 0;
  std::atomic<bool> counts_{false};
  size_t limit_ = 0;
  od_host_memory stats_{0, 0, 0, 0};
};

// Never destroyed: tensors may outlive static variables.
HostAllocator& allocator() {
  static auto* made = new HostAllocator();
  return *made;
}

void HostAllocator::give_back(void* data) { allocator().take_back(data); }

}  // namespace

void overdrive::watch_host_memory() { allocator().install(); }

od_status od_host_cache_limit(size_t bytes, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    allocator().install();
    allocator().set_kept(bytes);
  });
}

od_status od_host_cache_held(size_t* out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { *out = allocator().kept(); });
}

od_status od_host_memory_count(size_t limit, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    allocator().install();
    allocator().count(limit);
  });
}

void od_host_memory_trim(void) noexcept {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

od_status od_host_memory_install(od_error* err) noexcept {
  return overdrive::guarded(err, [] { allocator().install(); });
}

od_status od_host_memory_stats(od_host_memory* out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { *out = allocator().stats(); });
}

od_status od_host_memory_reset_peak(od_error* err) noexcept {
  return overdrive::guarded(err, [&] { allocator().reset_peak(); });
}
