#include "allocations.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

#include "guarded.h"
#include "owned.h"

using overdrive::Owned;

struct od_watch {
  Owned owned;
  void (*on_event)(void*, int32_t, uint64_t, uint64_t, int32_t);
};

namespace {

struct Watches {
  std::mutex mutex;
  std::vector<od_watch*> all;
  std::atomic<bool> any{false};
};

// Never destroyed: tensors may outlive static variables.
Watches& watches() {
  static auto* made = new Watches();
  return *made;
}

}  // namespace

namespace overdrive {

bool is_watched() noexcept { return watches().any.load(); }

void report(int32_t event, const void* address, size_t bytes, int32_t device) noexcept {
  if (!is_watched()) return;
  std::lock_guard<std::mutex> lock(watches().mutex);
  for (auto* watch : watches().all)
    watch->on_event(watch->owned.get(), event, reinterpret_cast<uint64_t>(address), bytes, device);
}

}  // namespace overdrive

od_status od_watch_begin(void* owner, void (*on_event)(void*, int32_t, uint64_t, uint64_t, int32_t),
                         void (*drop)(void*), od_watch** out, od_error* err) noexcept {
  Owned owned(owner, drop);
  return overdrive::guarded(err, [&] {
    overdrive::watch_host_memory();
    overdrive::watch_device_memory();
    auto watch = std::make_unique<od_watch>(od_watch{std::move(owned), on_event});
    std::lock_guard<std::mutex> lock(watches().mutex);
    watches().all.push_back(watch.get());
    watches().any = true;
    *out = watch.release();
  });
}

void od_watch_end(od_watch* watch) noexcept {
  {
    std::lock_guard<std::mutex> lock(watches().mutex);
    auto& all = watches().all;
    all.erase(std::remove(all.begin(), all.end(), watch), all.end());
    watches().any = !all.empty();
  }
  delete watch;
}
