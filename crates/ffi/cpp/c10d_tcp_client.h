// A client of a TCP store that waits for answers only for a time, though the store's server stands still.
#pragma once

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "c10d_turns.h"

namespace overdrive {

// What ranks' watchdogs tell each other: to write what they know (`kStoreDumpKey` of ProcessGroupNCCL.hpp), that work has
// failed (`kStoreErrorSignalKey`, after a group's prefix), and which work has begun and ended, such as
// `NCCL_0_trace_start` (`TORCH_NCCL_DESYNC_DEBUG`).
inline bool is_signal(const std::string& key) {
  auto has = [&key](const char* part) { return key.find(part) != std::string::npos; };
  return key == "exception_dump" || has("remote_error:") || (has("NCCL_") && has("_trace_"));
}

// libtorch's client waits for answers without a limit, and holds its lock meanwhile. A process that is frozen, or whose
// host is gone, closes no connection and answers nothing, so all who ask would wait forever. Here libtorch's client asks
// in a thread of its own, and who waits for it gives up at the timeout: the call's, or else the store's.
//
// NCCL's heartbeat monitor asks for signals once a second when work is late, and its watchdog asks and sends before it
// ends the process. They wait for a second. A signal that gets no answer is lost.
class TcpClient final : public c10d::Store {
 public:
  using Bytes = std::vector<uint8_t>;
  using Keys = std::vector<std::string>;
  using Millis = std::chrono::milliseconds;

  // `server` lives as long as this, if this process serves the store.
  explicit TcpClient(const c10::intrusive_ptr<c10d::TCPStore>& client,
                     std::shared_ptr<c10d::TCPStore> server = nullptr)
      : c10d::Store(client->getTimeout()), server_(std::move(server)), turns_(client) {}

  c10::intrusive_ptr<c10d::Store> clone() override {
    auto copy = ask([](auto& store) { return store.clone(); });
    return c10::make_intrusive<TcpClient>(c10::static_intrusive_pointer_cast<c10d::TCPStore>(copy), server_);
  }

  void set(const std::string& key, const Bytes& value) override {
    if (!is_signal(key)) return ask([=](auto& store) { store.set(key, value); });
    signal([=](auto& store) { return store.set(key, value), true; });
  }

  Bytes compareSet(const std::string& key, const Bytes& expected, const Bytes& desired) override {
    return ask([=](auto& store) { return store.compareSet(key, expected, desired); });
  }

  Bytes get(const std::string& key) override {
    return ask([key](auto& store) { return store.get(key); });
  }

  int64_t add(const std::string& key, int64_t value) override {
    return ask([=](auto& store) { return store.add(key, value); });
  }

  bool deleteKey(const std::string& key) override {
    return ask([key](auto& store) { return store.deleteKey(key); });
  }

  // False too if the server does not answer whether there are these signals.
  bool check(const Keys& keys) override {
    auto check = [keys](auto& store) { return store.check(keys); };
    if (!std::all_of(keys.begin(), keys.end(), is_signal)) return ask(check);
    return signal(check).value_or(false);
  }

  int64_t getNumKeys() override {
    return ask([](auto& store) { return store.getNumKeys(); });
  }

  void wait(const Keys& keys) override { wait(keys, timeout_); }

  void wait(const Keys& keys, const Millis& timeout) override {
    ask_within(timeout, [=](auto& store) { store.wait(keys, timeout); });
  }

  void append(const std::string& key, const Bytes& value) override {
    ask([=](auto& store) { store.append(key, value); });
  }

  std::vector<Bytes> multiGet(const Keys& keys) override {
    return ask([keys](auto& store) { return store.multiGet(keys); });
  }

  void multiSet(const Keys& keys, const std::vector<Bytes>& values) override {
    ask([=](auto& store) { store.multiSet(keys, values); });
  }

  bool hasExtendedApi() const override { return true; }

  void queuePush(const std::string& key, const Bytes& value) override {
    ask([=](auto& store) { store.queuePush(key, value); });
  }

  Bytes queuePop(const std::string& key, bool block) override {
    return ask([=](auto& store) { return store.queuePop(key, block); });
  }

  int64_t queueLen(const std::string& key) override {
    return ask([key](auto& store) { return store.queueLen(key); });
  }

  Keys listKeys() override {
    return ask([](auto& store) { return store.listKeys(); });
  }

 private:
  static constexpr std::chrono::seconds kPatience{1};

  template <typename Ask>
  using Answer = std::invoke_result_t<Ask, c10d::TCPStore&>;

  template <typename Ask>
  using Task = std::packaged_task<Answer<Ask>(c10d::TCPStore&)>;

  // `ask` owns what it uses, for it may be left behind.
  template <typename Ask>
  Answer<Ask> ask(Ask ask) {
    return ask_within(timeout_, [ask = std::move(ask), timeout = timeout_](c10d::TCPStore& store) {
      store.setTimeout(timeout);
      return ask(store);
    });
  }

  template <typename Ask>
  Answer<Ask> ask_within(Millis timeout, Ask ask) {
    auto task = std::make_shared<Task<Ask>>(std::move(ask));
    turns_.take([task](c10d::TCPStore& store) { (*task)(store); }, timeout);
    return task->get_future().get();
  }

  // Without a value if there is no answer.
  template <typename Ask>
  std::optional<Answer<Ask>> signal(Ask ask) {
    auto task = std::make_shared<Task<Ask>>(std::move(ask));
    try {
      turns_.take([task](c10d::TCPStore& store) { (*task)(store); }, kPatience, true);
    } catch (const c10::DistStoreError&) {
      return std::nullopt;
    }
    return task->get_future().get();
  }

  std::shared_ptr<c10d::TCPStore> server_;
  Turns turns_;
};

}  // namespace overdrive
