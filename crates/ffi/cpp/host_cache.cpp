// A CPU allocator that keeps freed blocks for the next allocations, as the CUDA allocator does.
//
// malloc may return a large freed block to the system, depending on the state of its heap; the next block then costs a
// page fault every 4 KiB. Gradients are freed and allocated in every step.
#include <algorithm>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include "guarded.h"
#include "huge_pages.h"

namespace {

// Smaller blocks are left to malloc, which is good at them.
constexpr size_t kSmallest = 256 << 10;
constexpr size_t kGranularity = 64 << 10;

class CachingAllocator final : public c10::Allocator {
 public:
  // Replaces the current allocator, which still serves small blocks and frees its own. Call it once.
  void install() {
    before_ = c10::GetCPUAllocator();
    c10::SetCPUAllocator(this);
  }

  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < kSmallest) return before_->allocate(bytes);
    void* data = lend(bytes);
    c10::profiledCPUMemoryReporter().New(data, bytes);
    return {data, data, &give_back, c10::Device(c10::kCPU)};
  }

  c10::DeleterFnPtr raw_deleter() const override { return &give_back; }

  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  void set_limit(size_t limit) {
    std::lock_guard<std::mutex> lock(mutex_);
    limit_ = limit;
    shrink();
  }

  size_t held() {
    std::lock_guard<std::mutex> lock(mutex_);
    return held_;
  }

 private:
  struct Block {
    void* data;
    size_t bytes;
  };

  static void give_back(void* data);

  void* lend(size_t bytes) {
    Block block = find(bytes);
    if (block.data == nullptr) block = make(bytes);
    try {
      std::lock_guard<std::mutex> lock(mutex_);
      lent_.emplace(block.data, block.bytes);
    } catch (...) {
      c10::free_cpu(block.data);
      throw;
    }
    return block.data;
  }

  // The newest block that fits without wasting a quarter: the block freed last may still be in the processor's cache.
  Block find(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto fits = [&](const Block& block) { return block.bytes >= bytes && block.bytes / 5 * 4 <= bytes; };
    auto found = std::find_if(free_.rbegin(), free_.rend(), fits);
    if (found == free_.rend()) return {nullptr, 0};
    auto block = *found;
    free_.erase(std::next(found).base());
    held_ -= block.bytes;
    return block;
  }

  Block make(size_t bytes) {
    bytes = (bytes + kGranularity - 1) / kGranularity * kGranularity;
    void* data = nullptr;
    try {
      data = c10::alloc_cpu(bytes);
    } catch (const c10::Error&) {
      if (held() == 0) throw;
      drop_all();
      data = c10::alloc_cpu(bytes);
    }
    overdrive::advise_huge_pages(data, bytes);
    return {data, bytes};
  }

  // oneDNN allocates with the current allocator and frees with a later one, passing only the address. So a block that
  // was not lent here is older than this allocator, or small.
  void take_back(void* data) {
    std::unique_lock<std::mutex> lock(mutex_);
    auto found = lent_.find(data);
    if (found == lent_.end()) {
      lock.unlock();
      return before_->raw_deallocate(data);
    }
    Block block{data, found->second};
    lent_.erase(found);
    // Report it before another thread can take the block.
    c10::profiledCPUMemoryReporter().Delete(data);
    // A block above the limit would evict all others, and then itself.
    bool keeps = block.bytes <= limit_;
    try {
      if (keeps) free_.push_back(block);
    } catch (const std::bad_alloc&) {
      keeps = false;
    }
    if (keeps) {
      held_ += block.bytes;
      shrink();
    }
    lock.unlock();
    if (!keeps) c10::free_cpu(data);
  }

  void drop_all() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& block : free_) c10::free_cpu(block.data);
    free_.clear();
    held_ = 0;
  }

  // Frees the blocks that were freed longest ago.
  void shrink() {
    auto keep = free_.begin();
    for (; held_ > limit_ && keep != free_.end(); ++keep) {
      held_ -= keep->bytes;
      c10::free_cpu(keep->data);
    }
    free_.erase(free_.begin(), keep);
  }

  c10::Allocator* before_ = nullptr;
  std::mutex mutex_;
  std::unordered_map<void*, size_t> lent_;
  std::vector<Block> free_;  // in the order in which they were freed
  size_t held_ = 0;
  size_t limit_ = 0;
};

// Never destroyed: tensors may outlive static variables.
CachingAllocator& allocator() {
  static auto* made = new CachingAllocator();
  return *made;
}

void CachingAllocator::give_back(void* data) { allocator().take_back(data); }

}  // namespace

od_status od_host_cache_limit(size_t bytes, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    static bool installed = (allocator().install(), true);
    (void)installed;
    allocator().set_limit(bytes);
  });
}

od_status od_host_cache_held(size_t* out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { *out = allocator().held(); });
}
