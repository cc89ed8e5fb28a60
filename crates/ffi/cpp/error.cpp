#include "guarded.h"

void od_error_clear(od_error* err) noexcept {
  std::free(err->message);
  std::free(err->detail);
  err->message = nullptr;
  err->detail = nullptr;
}

void od_error_set(od_error* err, const char* message) noexcept {
  err->message = overdrive::copy_string(message);
  err->detail = overdrive::copy_string(message);
}

void od_string_free(char* string) noexcept { std::free(string); }

// Throws one exception of each kind, so that a test can check that none of them crosses into Rust.
od_status od_test_throw(int32_t what, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    c10::SourceLocation here{__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
    switch (what) {
      case 0: throw c10::OutOfMemoryError(here, "planted out of memory");
      case 1: throw c10::AcceleratorError(here, 2, "planted CUDA error");
      case 2: throw c10::DistNetworkError(here, "planted distributed error");
      case 3: throw c10::ValueError(here, "planted value error");
      case 4: throw std::bad_alloc();
      case 5: throw std::runtime_error("planted runtime error");
      case 6: throw 42;
      default: return;
    }
  });
}
