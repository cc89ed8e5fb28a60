// Questions to a TCP store's server, one at a time, that can be given up.
#pragma once

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

namespace overdrive {

// Asks in a thread of its own. A question that was given up stays with that thread, which reads the answer when it comes.
// Until then nothing else is asked, so no question gets the answer to another one.
class Turns {
 public:
  using Millis = std::chrono::milliseconds;
  using Client = c10::intrusive_ptr<c10d::TCPStore>;
  // Makes the client when it is first asked, in that thread, or again where that has failed.
  using Connect = std::function<const Client&()>;
  using Ask = std::function<void(const Connect&, Millis)>;

  // `place`: the server's, for errors.
  Turns(Connect client, std::string place)
      : shared_(std::make_shared<Shared>(std::move(client))), place_(std::move(place)) {
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

  static constexpr std::chrono::seconds kGrace{1};

  // Waits for the turn and for the answer, which `ask` stores; it gets the time that is left, must not throw, and owns
  // what it uses, because it may be left behind. Throws after `limit`, and at once where the server has not answered
  // another question for as long.
  //
  // `grace` is waited after `limit` too: the client has the same limit, and then says itself what is missing; and if
  // this process was frozen itself, the answer may have come meanwhile.
  void take(Ask ask, Millis limit, Millis grace = kGrace) {
    Lock lock(shared_->mutex);
    put(lock, std::move(ask), turn(lock, limit, grace), grace);
  }

  // Or returns false at once where another thread waits for an answer.
  bool take_if_free(const Ask& ask, Millis limit, Millis grace = kGrace) {
    Lock lock(shared_->mutex);
    if (shared_->now != nullptr && !shared_->now->is_late) return false;
    put(lock, ask, turn(lock, limit, grace), grace);
    return true;
  }

 private:
  using Clock = std::chrono::steady_clock;
  using Lock = std::unique_lock<std::mutex>;

  struct Question {
    Ask ask;
    Millis limit;
    Clock::time_point since;
    bool is_late = false;
    bool is_answered = false;
  };

  struct Shared {
    explicit Shared(Connect client) : client(std::move(client)) {}

    void answer_all() {
      std::unique_lock<std::mutex> lock(mutex);
      while (true) {
        asked.wait(lock, [this] { return now != nullptr || is_over; });
        if (now == nullptr) return;
        auto question = now;
        lock.unlock();
        question->ask(client, question->limit);
        lock.lock();
        question->is_answered = true;
        now = nullptr;
        // Who is woken finds the lock free.
        lock.unlock();
        answered.notify_all();
        lock.lock();
      }
    }

    Connect client;
    std::mutex mutex;
    std::condition_variable asked;
    std::condition_variable answered;
    // The one that is not answered yet.
    std::shared_ptr<Question> now;
    bool is_over = false;
  };

  // Waits until `deadline`, and then for `grace`, which begins when this process thaws if it was frozen meanwhile.
  template <typename Predicate>
  bool comes_by(Lock& lock, Clock::time_point deadline, Millis grace, const Predicate& is_there) {
    auto& answered = shared_->answered;
    return answered.wait_until(lock, deadline, is_there) || answered.wait_for(lock, grace, is_there);
  }

  // Waits until nothing is asked, and returns what is left of `limit`.
  Millis turn(Lock& lock, Millis limit, Millis grace) {
    auto& [client, mutex, asked, answered, now, is_over] = *shared_;
    if (now == nullptr) return limit;
    auto deadline = Clock::now() + limit;
    while (now != nullptr) {
      if (!comes_by(lock, deadline, grace, [&now = now] { return now == nullptr || now->is_late; })) throw_busy(limit);
      if (now == nullptr) break;
      auto late = now;
      auto patience = std::min(deadline, late->since + limit);
      if (!answered.wait_until(lock, patience, [&, &now = now] { return now != late; })) throw_late(limit);
    }
    // Enough for an answer, also after the deadline.
    return std::max(std::chrono::ceil<Millis>(deadline - Clock::now()), std::min<Millis>(limit, kGrace));
  }

  void put(Lock& lock, Ask ask, Millis limit, Millis grace) {
    auto own = std::make_shared<Question>(Question{std::move(ask), limit, Clock::now()});
    shared_->now = own;
    shared_->asked.notify_one();
    if (comes_by(lock, own->since + limit, grace, [&] { return own->is_answered; })) return;
    own->is_late = true;
    shared_->answered.notify_all();
    throw_late(limit);
  }

  [[noreturn]] void throw_late(Millis limit) const {
    C10_THROW_ERROR(DistStoreError, c10::str("timed out: the store at ", place_, " has not answered within ",
                                             limit.count() / 1e3, " s; is rank 0's process stopped?"));
  }

  [[noreturn]] void throw_busy(Millis limit) const {
    C10_THROW_ERROR(DistStoreError, c10::str("timed out: another thread has waited for the store at ", place_, " for ",
                                             limit.count() / 1e3, " s; give each thread that waits its own store"));
  }

  std::shared_ptr<Shared> shared_;
  std::string place_;
  std::thread thread_;
};

}  // namespace overdrive
