// A client of rank 0's TCP store that lets libtorch's NCCL watchdog end its process though the server stands still.
#pragma once

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

namespace overdrive {

// What ranks' watchdogs tell each other: to write what they know (`kStoreDumpKey` of ProcessGroupNCCL.hpp), and that
// work has failed (`kStoreErrorSignalKey`, after a group's prefix).
inline bool is_signal(const std::string& key) {
  return key == "exception_dump" || key.find("remote_error:") != std::string::npos;
}

// A process that is frozen, or whose host is gone, closes no connection and answers nothing. libtorch waits for answers
// without a limit, and holds the client's lock. Its heartbeat monitor asks for signals once a second when work is late,
// and its watchdog sends one before it ends the process. So the watchdog would wait for that lock forever. Here signals
// are tried only for a time.
struct TcpClient : c10d::TCPStore {
  using c10d::TCPStore::TCPStore;

  // False too if the server does not answer whether there are these signals.
  bool check(const std::vector<std::string>& keys) override {
    if (!std::all_of(keys.begin(), keys.end(), is_signal)) return TCPStore::check(keys);
    auto found = std::make_shared<bool>(false);
    return attempt([this, keys, found] { *found = TCPStore::check(keys); }) && *found;
  }

  // A signal is lost if the server does not answer.
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    if (!is_signal(key)) return TCPStore::set(key, value);
    attempt([this, key, value] { TCPStore::set(key, value); });
  }

 private:
  static constexpr std::chrono::seconds kPatience{1};

  struct Question {
    bool is_answered = false;
    bool is_late = false;
    std::exception_ptr failure;
  };

  // Asks the server in a thread of its own. False if it does not answer in time: then the thread is left behind, and no
  // more is asked until it has its answer.
  bool attempt(std::function<void()> ask) {
    auto deadline = std::chrono::steady_clock::now() + kPatience;
    std::unique_lock<std::mutex> lock(mutex_);
    auto is_turn = [this] { return question_ == nullptr || question_->is_late; };
    if (!changed_.wait_until(lock, deadline, is_turn) || question_ != nullptr) return false;
    auto own = std::make_shared<Question>();
    std::thread([self = c10::intrusive_ptr<TcpClient>::reclaim_copy(this), ask = std::move(ask), own] {
      std::exception_ptr failure;
      try {
        ask();
      } catch (...) {
        failure = std::current_exception();
      }
      std::lock_guard<std::mutex> lock(self->mutex_);
      own->is_answered = true;
      own->failure = failure;
      self->question_ = nullptr;
      self->changed_.notify_all();
    }).detach();
    question_ = own;
    own->is_late = !changed_.wait_until(lock, deadline, [&] { return own->is_answered; });
    if (own->is_late) changed_.notify_all();
    if (own->failure) std::rethrow_exception(own->failure);
    return !own->is_late;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  // The one that is not answered yet.
  std::shared_ptr<Question> question_;
};

}  // namespace overdrive
