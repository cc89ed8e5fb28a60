// A CPU allocator that keeps what is freed for what is allocated next, as the CUDA one does.
//
// malloc gives a large block back to the system when it is freed, or not, as its heap happens to lie; the next block then
// costs a page fault every 4 KiB. Gradients are freed and allocated in every step.
#include <algorithm>
#include <mutex>
#include <vector>

#include <c10/core/Allocator.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/alloc_cpu.h>

#include "guarded.h"
#include "huge_pages.h"

namespace {

// Smaller blocks are malloc's, which is good at them.
constexpr size_t kSmallest = 256 << 10;
constexpr size_t kGranularity = 64 << 10;

// Lies before the data: whoever frees knows nothing but where the data is, because oneDNN takes memory without a context.
struct alignas(c10::gAlignment) Block {
  size_t bytes;  // of the data

  void* data() { return this + 1; }
  static Block* of(void* data) { return static_cast<Block*>(data) - 1; }
};

class CachingAllocator final : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    auto* block = bytes < kSmallest ? nullptr : find(bytes);
    if (block == nullptr) block = make(bytes);
    c10::profiledCPUMemoryReporter().New(block->data(), bytes);
    return {block->data(), block->data(), &give_back, c10::Device(c10::kCPU)};
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

  void keep_or_free(Block* block) {
    if (block->bytes < kSmallest) return release(block);
    std::unique_lock<std::mutex> lock(mutex_);
    if (block->bytes > limit_) {
      // Kept, it would push out all others, and then itself.
      lock.unlock();
      return release(block);
    }
    try {
      free_.push_back(block);
    } catch (const std::bad_alloc&) {
      lock.unlock();
      return release(block);
    }
    held_ += block->bytes;
    shrink();
  }

 private:
  static void give_back(void* data);

  static void release(Block* block) { c10::free_cpu(block); }

  // The newest that fits without wasting a quarter: what was freed last may still be in the processor's cache.
  Block* find(size_t bytes) {
    std::lock_guard<std::mutex> lock(mutex_);
    auto fits = [&](const Block* block) { return block->bytes >= bytes && block->bytes / 5 * 4 <= bytes; };
    auto found = std::find_if(free_.rbegin(), free_.rend(), fits);
    if (found == free_.rend()) return nullptr;
    auto* block = *found;
    free_.erase(std::next(found).base());
    held_ -= block->bytes;
    return block;
  }

  Block* make(size_t bytes) {
    if (bytes >= kSmallest) bytes = (bytes + kGranularity - 1) / kGranularity * kGranularity;
    void* memory = nullptr;
    try {
      memory = c10::alloc_cpu(sizeof(Block) + bytes);
    } catch (const c10::Error&) {
      if (held() == 0) throw;
      drop_all();
      memory = c10::alloc_cpu(sizeof(Block) + bytes);
    }
    overdrive::advise_huge_pages(memory, bytes);
    return new (memory) Block{bytes};
  }

  void drop_all() {
    std::lock_guard<std::mutex> lock(mutex_);
    for (auto* block : free_) release(block);
    free_.clear();
    held_ = 0;
  }

  // What was freed longest ago goes first.
  void shrink() {
    auto keep = free_.begin();
    for (; held_ > limit_ && keep != free_.end(); ++keep) {
      held_ -= (*keep)->bytes;
      release(*keep);
    }
    free_.erase(free_.begin(), keep);
  }

  std::mutex mutex_;
  std::vector<Block*> free_;  // by the time of their freeing
  size_t held_ = 0;
  size_t limit_ = 0;
};

// Never destroyed: tensors may outlive everything else.
CachingAllocator& allocator() {
  static auto* made = new CachingAllocator();
  return *made;
}

void CachingAllocator::give_back(void* data) {
  c10::profiledCPUMemoryReporter().Delete(data);
  if (data != nullptr) allocator().keep_or_free(Block::of(data));
}

}  // namespace

od_status od_host_cache_limit(size_t bytes, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    // Blocks know how they are to be freed, so those that are out stay with the allocator that made them.
    static bool installed = (c10::SetCPUAllocator(&allocator()), true);
    (void)installed;
    allocator().set_limit(bytes);
  });
}

od_status od_host_cache_held(size_t* out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] { *out = allocator().held(); });
}
