// Questions to a TCP store's server, one at a time, that can be given up.
#pragma once

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace overdrive {

// Asks in a thread of its own. A question that was given up stays with that thread, which reads the answer when it comes.
// Until then nothing else is asked, so no question gets the answer to another one.
class Turns {
 public:
  using Ask = std::function<void(c10d::TCPStore&)>;
  using Millis = std::chrono::milliseconds;

  explicit Turns(c10::intrusive_ptr<c10d::TCPStore> client) : shared_(std::make_shared<Shared>(std::move(client))) {
    thread_ = std::thread([shared = shared_] { shared->answer_all(); });
  }

  Turns(const Turns&) = delete;
  Turns& operator=(const Turns&) = delete;

  // Does not wait for an answer.
  ~Turns() {
    std::unique_lock<std::mutex> lock(shared_->mutex);
    shared_->is_over = true;
    bool is_late = shared_->now != nullptr;
    lock.unlock();
    shared_->asked.notify_one();
    is_late ? thread_.detach() : thread_.join();
  }

  // Waits for the turn and for the answer, which `ask` stores. `ask` must not throw, and owns what it uses, because it may
  // be left behind. Throws after `limit`, and at once while another question is unanswered that was given up. But others
  // do not give up because of a signal, whose limit is short.
  void take(Ask ask, Millis limit, bool is_signal = false) {
    auto& [client, mutex, asked, answered, now, is_over] = *shared_;
    auto deadline = std::chrono::steady_clock::now() + limit;
    std::unique_lock<std::mutex> lock(mutex);
    auto is_turn = [&, &now = now] { return now == nullptr || (now->is_late && (is_signal || !now->is_signal)); };
    if (!answered.wait_until(lock, deadline, is_turn)) now->is_late ? throw_late(limit) : throw_busy(limit);
    if (now != nullptr) throw_late(now->limit);
    auto own = std::make_shared<Question>(Question{std::move(ask), limit, is_signal});
    now = own;
    asked.notify_one();
    auto is_answered = [&] { return own->is_answered; };
    if (answered.wait_until(lock, deadline, is_answered)) return;
    // The client has the same limit, and then says itself what is missing. And if this process was frozen itself, the
    // answer may have come meanwhile.
    if (!is_signal && answered.wait_for(lock, kGrace, is_answered)) return;
    own->is_late = true;
    answered.notify_all();
    throw_late(limit);
  }

 private:
  static constexpr std::chrono::seconds kGrace{1};

  struct Question {
    Ask ask;
    Millis limit;
    bool is_signal;
    bool is_late = false;
    bool is_answered = false;
  };

  struct Shared {
    explicit Shared(c10::intrusive_ptr<c10d::TCPStore> client) : client(std::move(client)) {}

    void answer_all() {
      std::unique_lock<std::mutex> lock(mutex);
      while (true) {
        asked.wait(lock, [this] { return now != nullptr || is_over; });
        if (now == nullptr) return;
        auto question = now;
        lock.unlock();
        question->ask(*client);
        lock.lock();
        question->is_answered = true;
        now = nullptr;
        // Who is woken finds the lock free.
        lock.unlock();
        answered.notify_all();
        lock.lock();
      }
    }

    c10::intrusive_ptr<c10d::TCPStore> client;
    std::mutex mutex;
    std::condition_variable asked;
    std::condition_variable answered;
    // The one that is not answered yet.
    std::shared_ptr<Question> now;
    bool is_over = false;
  };

  std::string place() const { return c10::str(shared_->client->getHost(), ":", shared_->client->getPort()); }

  [[noreturn]] void throw_late(Millis limit) const {
    C10_THROW_ERROR(DistStoreError, c10::str("timed out: the store at ", place(), " has not answered within ",
                                             limit.count() / 1e3, " s; is rank 0's process stopped?"));
  }

  [[noreturn]] void throw_busy(Millis limit) const {
    C10_THROW_ERROR(DistStoreError, c10::str("timed out: another thread has waited for the store at ", place(), " for ",
                                             limit.count() / 1e3, " s; give each thread that waits its own store"));
  }

  std::shared_ptr<Shared> shared_;
  std::thread thread_;
};

}  // namespace overdrive
