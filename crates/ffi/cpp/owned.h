// Objects of Rust's that C++ keeps.
#pragma once

#include <utility>

namespace overdrive {

// Owns an object of Rust's, and drops it once.
class Owned {
 public:
  Owned(void* owner, void (*drop)(void*)) : owner_(owner), drop_(drop) {}
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Owned(Owned&& other) noexcept : owner_(other.release()), drop_(other.drop_) {}
  ~Owned() {
    if (owner_ != nullptr) drop_(owner_);
  }
  void* get() const { return owner_; }
  // Hands the object back: it is Rust's again.
  void* release() noexcept { return std::exchange(owner_, nullptr); }

 private:
  void* owner_;
  void (*drop_)(void*);
};

}  // namespace overdrive
