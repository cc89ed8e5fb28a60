// Reuses the events of a GPU, because the driver takes long to make one.
#pragma once

#include <mutex>
#include <vector>

#include <c10/core/Event.h>

#include "cuda_device.h"

namespace overdrive {

class EventPool {
 public:
  explicit EventPool(c10::Device device) : device_(device) {}

  ~EventPool() {
    try {
      on_device(device_, [&] { idle_.clear(); });
    } catch (...) {
      // The device is lost, and its events with it.
    }
  }

  // An event that was waited for, if there is one. Recording it again does not change what waits for it already.
  c10::Event take() {
    std::lock_guard<std::mutex> lock(mutex_);
    if (idle_.empty()) return c10::Event(device_.type());
    auto event = std::move(idle_.back());
    idle_.pop_back();
    return event;
  }

  void give(c10::Event event) {
    std::lock_guard<std::mutex> lock(mutex_);
    idle_.push_back(std::move(event));
  }

 private:
  const c10::Device device_;
  std::mutex mutex_;
  std::vector<c10::Event> idle_;
};

}  // namespace overdrive
