// `guarded` for calls that may fail between ranks, and the handles of c10d.h.
#pragma once

#include <algorithm>
#include <atomic>
#include <cctype>
#include <chrono>
#include <string>

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include "c10d.h"
#include "c10d_one_at_a_time.h"
#include "c10d_registrations.h"
#include "guarded.h"

struct od_store {
  c10::intrusive_ptr<c10d::Store> store;
};

struct od_group {
  c10::intrusive_ptr<overdrive::OneAtATime> group;
  // The backends, to check for work under way before they are destroyed.
  std::vector<c10::intrusive_ptr<c10d::Backend>> backends;
  bool verifies = false;
  // Where members of a group over Gloo count those that have connected to all others; null once all have.
  mutable c10::intrusive_ptr<c10d::Store> connections;
  // The communicators are freed, or being freed: nothing may touch them.
  mutable std::atomic<bool> is_shut_down{false};
  // Over NCCL.
  std::shared_ptr<overdrive::Registrations> registrations;
};

struct od_work {
  c10::intrusive_ptr<c10d::Work> work;
  // Keeps the tensors alive that the work reads and writes.
  std::vector<at::Tensor> tensors;
  // A send or receive, which Gloo runs only as long as its work lives.
  bool between_two = false;
  // NCCL's: the stream waits for it.
  bool on_stream = false;
  std::shared_ptr<overdrive::Failures> failures;
  mutable std::atomic<bool> was_waited_for{false};
  // A wait has ended without it: if the group is dropped now, it need not wait either.
  mutable std::atomic<bool> is_given_up{false};

  void give_up() const {
    if (!is_given_up.exchange(true)) ++failures->given_up;
  }
  void take_back() const {
    if (is_given_up.exchange(false)) --failures->given_up;
  }
};

namespace overdrive {

inline bool reports_timeout(const char* message) {
  std::string text(message);
  std::transform(text.begin(), text.end(), text.begin(), [](unsigned char c) { return std::tolower(c); });
  return text.find("timed out") != std::string::npos || text.find("timeout") != std::string::npos ||
         text.find("failed to pass monitoredbarrier") != std::string::npos;
}

// gloo throws plain std::exceptions when a peer is gone; libtorch's own errors are c10::Errors.
template <typename Body>
od_status between_ranks(od_error* err, Body&& body) noexcept {
  od_status status = guarded(err, [&] {
    try {
      body();
    } catch (const c10::Error&) {
      throw;
    } catch (const std::bad_alloc&) {
      throw;
    } catch (const std::exception& e) {
      throw c10::DistNetworkError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, e.what());
    }
  });
  bool failed = status == OD_DISTRIBUTED || status == OD_OTHER;
  if (failed && err != nullptr && err->message != nullptr && reports_timeout(err->message)) return OD_TIMEOUT;
  return status;
}

inline std::vector<at::Tensor> to_vector(const od_tensor_list* list) {
  std::vector<at::Tensor> tensors;
  if (list == nullptr) return tensors;
  tensors.reserve(list->list.size());
  for (size_t i = 0; i < list->list.size(); ++i) tensors.push_back(list->list.get(i));
  return tensors;
}

// Backends access tensors without checking that they are defined.
inline std::vector<at::Tensor> to_defined(const od_tensor_list* list) {
  auto tensors = to_vector(list);
  for (const auto& tensor : tensors) TORCH_CHECK(tensor.defined(), "ranks cannot exchange an undefined tensor");
  return tensors;
}

inline od_tensor_list* to_list(const std::vector<at::Tensor>& tensors) {
  auto list = std::make_unique<od_tensor_list>();
  list->list.reserve(tensors.size());
  for (const auto& tensor : tensors) list->list.push_back(tensor);
  return list.release();
}

}  // namespace overdrive
