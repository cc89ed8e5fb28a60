// A client of a TCP store that waits for answers only for a time, though the store's server stands still.
#pragma once

#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <algorithm>
#include <future>
#include <memory>
#include <mutex>
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
// ends the process. They wait for half a second, because a launcher waits for that end, and take another connection
// where a thread of this process waits on this one. A signal may be lost if the server does not answer.
class TcpClient final : public c10d::Store {
 public:
  using Bytes = std::vector<uint8_t>;
  using Keys = std::vector<std::string>;
  using Millis = std::chrono::milliseconds;

  // `server` lives as long as this, if this process serves the store.
  TcpClient(const Turns::Client& client, Millis timeout, std::shared_ptr<c10d::TCPStore> server = nullptr)
      : c10d::Store(timeout),
        server_(std::move(server)),
        host_(client->getHost()),
        port_(client->getPort()),
        turns_([client]() -> auto& { return client; }, place()) {}

  // While it lives, this thread's calls that have no timeout of their own have this one, and not the store's: a
  // PrefixStore passes on none but that of `wait`.
  class Limit {
   public:
    explicit Limit(Millis limit) { current() = limit; }
    Limit(const Limit&) = delete;
    ~Limit() { current().reset(); }

    static std::optional<Millis>& current() {
      thread_local std::optional<Millis> limit;
      return limit;
    }
  };

  c10::intrusive_ptr<c10d::Store> clone() override {
    auto copy = ask([](auto& store) { return store.clone(); });
    return c10::make_intrusive<TcpClient>(c10::static_intrusive_pointer_cast<c10d::TCPStore>(copy), timeout_, server_);
  }

  void set(const std::string& key, const Bytes& value) override {
    if (!is_signal(key)) return ask([=](auto& store) { store.set(key, value); });
    signal([=](auto& store, Millis) { return store.set(key, value), true; });
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
    if (!std::all_of(keys.begin(), keys.end(), is_signal))
      return ask([keys](auto& store) { return store.check(keys); });
    return signal([keys](auto& store, Millis) { return store.check(keys); }).value_or(false);
  }

  int64_t getNumKeys() override {
    return ask([](auto& store) { return store.getNumKeys(); });
  }

  void wait(const Keys& keys) override { wait(keys, timeout_); }

  void wait(const Keys& keys, const Millis& timeout) override {
    answer(timeout, [keys](auto& store, Millis left) { store.wait(keys, left); });
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
  static constexpr Millis kPatience{500};

  template <typename Ask, typename... Left>
  using Answer = std::invoke_result_t<Ask, c10d::TCPStore&, Left...>;

  // `ask` owns what it uses, for it may be left behind.
  template <typename Ask>
  Answer<Ask> ask(Ask ask) {
    return answer(Limit::current().value_or(timeout_), [ask = std::move(ask)](c10d::TCPStore& store, Millis left) {
      store.setTimeout(left);
      return ask(store);
    });
  }

  template <typename Ask>
  Answer<Ask, Millis> answer(Millis timeout, Ask ask) {
    auto [put, reply] = task(std::move(ask));
    turns_.take(std::move(put), timeout);
    return reply.get();
  }

  // Without a value if there is no answer.
  template <typename Ask>
  std::optional<Answer<Ask, Millis>> signal(Ask ask) {
    auto [put, reply] = task(std::move(ask));
    try {
      if (!turns_.take_if_free(put, kPatience, Millis::zero())) aside().take(put, kPatience, Millis::zero());
    } catch (const c10::DistStoreError&) {
      return std::nullopt;
    }
    return reply.get();
  }

  // A question, and what will be its answer or error.
  template <typename Ask>
  static std::pair<Turns::Ask, std::future<Answer<Ask, Millis>>> task(Ask ask) {
    auto asks = [ask = std::move(ask)](const Turns::Connect& client, Millis left) { return ask(*client(), left); };
    using Task = std::packaged_task<Answer<Ask, Millis>(const Turns::Connect&, Millis)>;
    auto task = std::make_shared<Task>(std::move(asks));
    auto reply = task->get_future();
    return {[task](auto& client, Millis left) { (*task)(client, left); }, std::move(reply)};
  }

  // Another connection, for signals, which is made when the first one is sent.
  Turns& aside() {
    std::call_once(aside_once_, [this] {
      c10d::TCPStoreOptions options;
      options.port = port_;
      options.waitWorkers = false;
      options.timeout = timeout_;
      auto connect = [host = host_, options, client = Turns::Client()]() mutable -> auto& {
        if (!client) client = c10::make_intrusive<c10d::TCPStore>(host, options);
        return std::as_const(client);
      };
      aside_.emplace(std::move(connect), place());
    });
    return *aside_;
  }

  std::string place() const { return c10::str(host_, ":", port_); }

  std::shared_ptr<c10d::TCPStore> server_;
  std::string host_;
  uint16_t port_;
  Turns turns_;
  std::once_flag aside_once_;
  std::optional<Turns> aside_;
};

}  // namespace overdrive
