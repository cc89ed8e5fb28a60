// Copies to a device, each of which holds up only what uses its tensor. Operators are seen by libtorch's hook for
// profilers; what it does not see finds memory that throws.
#include "arrivals.h"

#include <algorithm>
#include <atomic>
#include <exception>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

#include <ATen/record_function.h>

#include "access.h"
#include "guarded.h"
#include "storage.h"
#include "transfer.h"

struct od_arrivals {
  // Null where the copy was waited for.
  std::vector<std::unique_ptr<od_transfer>> transfers;
  std::vector<size_t> used;
};

namespace {

constexpr const char* ON_ITS_WAY =
    "a new value of this tensor is on its way from the host, and only libtorch's operators wait for it by themselves: "
    "call `wait_for_copies` of the optimizer first";

struct Expected {
  od_arrivals* owner;
  size_t at;
};

// What is on its way, of all optimizers. The transfers keep the memory.
struct Arriving {
  std::mutex mutex;
  std::unordered_multimap<c10::StorageImpl*, Expected> expected;
  at::CallbackHandle hook = at::INVALID_CALLBACK_HANDLE;
  // Whether there is a hook. Read without the lock, for those who need not be exact about other threads.
  std::atomic<bool> looks{false};
};

Arriving& arriving() {
  // Never freed: a hook may run until the process ends.
  static auto* all = new Arriving;
  return *all;
}

void look_no_more(Arriving& all) {
  if (!all.expected.empty() || !all.looks) return;
  at::removeCallback(all.hook);
  all.looks = false;
}

// All copies of one owner. What fails is thrown at the end; the device is lost then.
void finish(Arriving& all, od_arrivals& owner) {
  std::exception_ptr failed;
  for (auto& transfer : owner.transfers) {
    if (transfer == nullptr) continue;
    try {
      transfer->block_current();
    } catch (...) {
      failed = std::current_exception();
    }
    auto& storage = overdrive::storage_of(transfer->tensor);
    auto [begin, end] = all.expected.equal_range(&storage);
    while (begin != end) begin = begin->second.owner == &owner ? all.expected.erase(begin) : std::next(begin);
    // Another owner may expect a part of the same memory.
    if (all.expected.count(&storage) == 0) overdrive::throws_on_access(storage) = false;
    transfer.reset();
  }
  look_no_more(all);
  if (failed) std::rethrow_exception(failed);
}

void arrive_locked(Arriving& all, c10::StorageImpl& storage) {
  auto [begin, end] = all.expected.equal_range(&storage);
  if (begin == end) return;
  // After an error all is as before.
  for (auto it = begin; it != end; ++it) it->second.owner->transfers[it->second.at]->block_current();
  for (auto it = begin; it != end; ++it) {
    auto& [owner, at] = it->second;
    owner->used.push_back(at);
    owner->transfers[at].reset();
  }
  all.expected.erase(begin, end);
  overdrive::throws_on_access(storage) = false;
  look_no_more(all);
}

// A tensor, or tensors in a list, or in lists in a list as those of collectives.
void arrive_value(const c10::IValue& value) {
  if (value.isTensor()) {
    overdrive::arrive(value.toTensor());
  } else if (value.isList()) {
    for (const c10::IValue& element : value.toListRef()) arrive_value(element);
  }
}

std::unique_ptr<at::ObserverContext> before_operator(const at::RecordFunction& function) {
  try {
    for (const c10::IValue& input : function.inputs()) arrive_value(input);
  } catch (...) {
    // The memory still throws, and with it the operator.
  }
  return nullptr;
}

}  // namespace

void overdrive::arrive(const at::Tensor& tensor) {
  auto& all = arriving();
  if (!all.looks || !overdrive::has_storage(tensor) || !tensor.is_cuda()) return;
  std::lock_guard<std::mutex> lock(all.mutex);
  arrive_locked(all, overdrive::storage_of(tensor));
}

od_status od_arrivals_new(od_transfer* const* transfers, size_t n, od_arrivals** out, od_error* err) noexcept {
  std::unique_ptr<od_arrivals> made;
  auto taken = overdrive::guarded(err, [&] {
    made = std::make_unique<od_arrivals>();
    made->transfers.resize(n);
    made->used.reserve(n);
  });
  if (taken != OD_OK) {
    // The stream from which each was started waits for it.
    for (size_t at = 0; at < n; ++at) od_transfer_free(transfers[at]);
    return taken;
  }
  for (size_t at = 0; at < n; ++at) made->transfers[at].reset(transfers[at]);
  return overdrive::guarded(err, [&] {
    auto& all = arriving();
    std::lock_guard<std::mutex> lock(all.mutex);
    try {
      for (size_t at = 0; at < n; ++at) {
        auto& storage = overdrive::storage_of(made->transfers[at]->tensor);
        all.expected.emplace(&storage, Expected{made.get(), at});
        overdrive::forbid_access(storage, ON_ITS_WAY);
      }
      if (!all.expected.empty() && !all.looks) {
        all.hook = at::addGlobalCallback(
            at::RecordFunctionCallback(before_operator).needsInputs(true).scopes({at::RecordScope::FUNCTION}));
        all.looks = true;
      }
    } catch (...) {
      finish(all, *made);
      throw;
    }
    *out = made.release();
  });
}

od_status od_arrivals_finish(od_arrivals* arrivals, size_t* used, size_t* n_used, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto& all = arriving();
    std::lock_guard<std::mutex> lock(all.mutex);
    std::copy(arrivals->used.begin(), arrivals->used.end(), used);
    *n_used = arrivals->used.size();
    finish(all, *arrivals);
  });
}

void od_arrivals_free(od_arrivals* arrivals) noexcept {
  try {
    auto& all = arriving();
    std::lock_guard<std::mutex> lock(all.mutex);
    finish(all, *arrivals);
  } catch (...) {
    // The device is lost.
  }
  delete arrivals;
}
