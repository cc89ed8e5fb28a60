// An error or a panic of a Rust callback, on its way through libtorch to whoever called that.
#pragma once

#include <memory>
#include <stdexcept>
#include <string>

#include "guarded.h"
#include "owned.h"

namespace overdrive {

struct CallbackError final : std::runtime_error {
  CallbackError(const std::string& message, od_status status, std::shared_ptr<Owned> panic)
      : std::runtime_error(message), status(status), panic(std::move(panic)) {}
  od_status status;
  std::shared_ptr<Owned> panic;  // what Rust panicked with, if it did
};

// Throws what a callback has failed with, which it takes over.
[[noreturn]] inline void throw_failed(od_status status, void* panic, void (*drop_panic)(void*), od_error& error) {
  std::string message = error.message != nullptr ? error.message : "a callback failed";
  od_error_clear(&error);
  throw CallbackError(message, status, panic != nullptr ? std::make_shared<Owned>(panic, drop_panic) : nullptr);
}

// `guarded` for a body that may run callbacks: what one of them panicked with is handed to `panic`.
template <typename Body>
od_status guarded_callback(od_error* err, void** panic, Body&& body) noexcept {
  od_status failed = OD_OK;
  od_status status = guarded(err, [&] {
    try {
      body();
    } catch (const CallbackError& e) {
      failed = e.status;
      if (e.panic != nullptr) *panic = e.panic->release();
      throw;
    }
  });
  return failed == OD_OK ? status : failed;
}

}  // namespace overdrive
