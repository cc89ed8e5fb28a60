// Runs C++ code for Rust, and turns every exception into a status and a message, because no C++ exception may reach
// Rust.
#pragma once

#include <cstdlib>
#include <cstring>
#include <exception>
#include <new>
#include <string>

#include <c10/util/Exception.h>

#include "overdrive.h"

namespace overdrive {

// A copy that Rust frees by od_error_clear or od_string_free. Null when memory runs out, which Rust accepts.
inline char* copy_string(const char* text) noexcept {
  size_t bytes = std::strlen(text) + 1;
  auto* copy = static_cast<char*>(std::malloc(bytes));
  if (copy != nullptr) std::memcpy(copy, text, bytes);
  return copy;
}

// `detail` is the message with libtorch's C++ stack trace.
inline od_status fail(od_error* err, od_status status, const char* message, const char* detail) noexcept {
  if (err != nullptr) {
    err->message = copy_string(message);
    err->detail = copy_string(detail);
  }
  return status;
}

inline od_status fail(od_error* err, od_status status, const c10::Error& e) noexcept {
  return fail(err, status, e.what_without_backtrace(), e.what());
}

// When the host is out of memory, libtorch's CPU allocator throws a plain c10::Error, which only its text tells apart.
inline bool is_host_out_of_memory(const c10::Error& e) noexcept {
  return std::strstr(e.what_without_backtrace(), "DefaultCPUAllocator: ") != nullptr;
}

// What mapped_files.cpp throws.
inline bool is_file_failure(const c10::Error& e) noexcept {
  const char* text = e.what_without_backtrace();
  return std::strstr(text, "no file of ") != nullptr && std::strstr(text, " bytes for a tensor in ") != nullptr;
}

template <typename Body>
od_status guarded(od_error* err, Body&& body) noexcept {
  try {
    body();
    return OD_OK;
  } catch (const c10::OutOfMemoryError& e) {
    return fail(err, OD_OUT_OF_MEMORY, e);
  } catch (const c10::AcceleratorError& e) {
    return fail(err, OD_CUDA, e);
  } catch (const c10::DistError& e) {
    return fail(err, OD_DISTRIBUTED, e);
  } catch (const c10::Error& e) {
    return fail(err, is_host_out_of_memory(e) ? OD_OUT_OF_MEMORY : is_file_failure(e) ? OD_IO : OD_OTHER, e);
  } catch (const std::bad_alloc& e) {
    return fail(err, OD_OUT_OF_MEMORY, e.what(), e.what());
  } catch (const std::exception& e) {
    return fail(err, OD_OTHER, e.what(), e.what());
  } catch (...) {
    return fail(err, OD_OTHER, "a C++ exception of unknown type", "a C++ exception of unknown type");
  }
}

}  // namespace overdrive
