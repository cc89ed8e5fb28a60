// The key-value stores through which ranks find each other.
#include <torch/csrc/distributed/c10d/FileStore.hpp>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <map>
#include <mutex>

#include "c10d_guarded.h"
#include "c10d_tcp_client.h"

namespace {

std::vector<uint8_t> bytes_of(const uint8_t* value, size_t bytes) {
  return bytes == 0 ? std::vector<uint8_t>() : std::vector<uint8_t>(value, value + bytes);
}

std::vector<std::string> strings_of(const char* const* keys, size_t n) {
  return std::vector<std::string>(keys, keys + n);
}

// A client, which waits for a key and gets it by one question, in one turn.
bool is_client(const c10::intrusive_ptr<c10d::Store>& store) {
  // Not `dynamic_intrusive_pointer_cast`: where the cast fails, it keeps a reference for ever.
  auto* prefixed = dynamic_cast<c10d::PrefixStore*>(store.get());
  auto inner = prefixed ? prefixed->getUnderlyingNonPrefixStore() : store;
  return dynamic_cast<const overdrive::TcpClient*>(inner.get()) != nullptr;
}

// A new server on `socket`; without one, the server that this process already has at the port. It lives as long as one of
// its stores here. libtorch could share servers too, but finds them only by port, not by the address to which the given
// socket is bound.
std::shared_ptr<c10d::TCPStore> server_at(const std::string& host, const c10d::TCPStoreOptions& wanted, int socket) {
  static std::mutex lock;
  static std::map<uint16_t, std::weak_ptr<c10d::TCPStore>> servers;
  if (socket >= 0) {
    auto options = wanted;
    options.isServer = true;
    options.masterListenFd = socket;
    auto server = std::make_shared<c10d::TCPStore>(host, options);
    std::lock_guard<std::mutex> guard(lock);
    servers[wanted.port] = server;
    return server;
  }
  std::lock_guard<std::mutex> guard(lock);
  auto server = servers[wanted.port].lock();
  if (server == nullptr) C10_THROW_ERROR(DistNetworkError, c10::str("EADDRINUSE: port ", wanted.port, " is in use"));
  return server;
}

}  // namespace

od_status od_tcp_store_new(const od_tcp_store* options, od_store** out, od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] {
    std::string host(options->host);
    c10d::TCPStoreOptions client;
    client.port = options->port;
    if (options->world_size > 0) client.numWorkers = static_cast<size_t>(options->world_size);
    client.waitWorkers = options->wait_workers != 0;
    client.timeout = std::chrono::milliseconds(options->connect_ms);
    std::chrono::milliseconds timeout(options->timeout_ms);
    auto connect = [&](const std::shared_ptr<c10d::TCPStore>& server) {
      auto connected = c10::make_intrusive<c10d::TCPStore>(host, client);
      return c10::make_intrusive<overdrive::TcpClient>(connected, timeout, server);
    };
    if (options->is_server == 0) {
      *out = new od_store{connect(nullptr)};
      return;
    }
    // Only the server waits, so that this process is counted once.
    client.waitWorkers = false;
    auto server = server_at(host, client, options->socket);
    auto store = connect(server);
    if (options->wait_workers != 0 && options->socket >= 0) server->waitForWorkers();
    *out = new od_store{std::move(store)};
  });
}

od_status od_file_store_new(const char* path, int32_t world_size, int64_t timeout_ms, od_store** out,
                            od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] {
    auto store = c10::make_intrusive<c10d::FileStore>(std::string(path), world_size);
    store->setTimeout(std::chrono::milliseconds(timeout_ms));
    *out = new od_store{std::move(store)};
  });
}

od_status od_hash_store_new(od_store** out, od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] { *out = new od_store{c10::make_intrusive<c10d::HashStore>()}; });
}

od_status od_prefix_store_new(const char* prefix, const od_store* inner, od_store** out, od_error* err) noexcept {
  return overdrive::between_ranks(
      err, [&] { *out = new od_store{c10::make_intrusive<c10d::PrefixStore>(std::string(prefix), inner->store)}; });
}

void od_store_free(od_store* store) noexcept { delete store; }

od_status od_store_set(const od_store* store, const char* key, const uint8_t* value, size_t bytes,
                       od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] { store->store->set(key, bytes_of(value, bytes)); });
}

od_status od_store_get(const od_store* store, const char* key, int64_t timeout_ms, void* visitor,
                       void (*visit)(void*, const uint8_t*, size_t), od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] {
    std::chrono::milliseconds timeout(timeout_ms);
    if (!is_client(store->store)) store->store->wait({key}, timeout);
    overdrive::TcpClient::Limit limit(timeout);
    auto value = store->store->get(key);
    visit(visitor, value.data(), value.size());
  });
}

od_status od_store_compare_set(const od_store* store, const char* key, const uint8_t* expected, size_t expected_bytes,
                               const uint8_t* value, size_t bytes, void* visitor,
                               void (*visit)(void*, const uint8_t*, size_t), od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] {
    auto now = store->store->compareSet(key, bytes_of(expected, expected_bytes), bytes_of(value, bytes));
    visit(visitor, now.data(), now.size());
  });
}

od_status od_store_add(const od_store* store, const char* key, int64_t amount, int64_t* out, od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] { *out = store->store->add(key, amount); });
}

od_status od_store_check(const od_store* store, const char* const* keys, size_t n, int32_t* out,
                         od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] { *out = store->store->check(strings_of(keys, n)); });
}

od_status od_store_wait(const od_store* store, const char* const* keys, size_t n, int64_t timeout_ms,
                        od_error* err) noexcept {
  return overdrive::between_ranks(
      err, [&] { store->store->wait(strings_of(keys, n), std::chrono::milliseconds(timeout_ms)); });
}

od_status od_store_delete(const od_store* store, const char* key, int32_t* deleted, od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] { *deleted = store->store->deleteKey(key); });
}
