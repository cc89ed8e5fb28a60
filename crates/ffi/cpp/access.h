// Memory that nobody may access for a while.
#pragma once

#include <string>

#include <c10/core/StorageImpl.h>

namespace overdrive {

// Whether any access throws. libtorch can make it so, with a message, but has no function that ends this. C++ allows
// the name of a private member in an explicit instantiation, which hands it to a friend.
bool& throws_on_access(c10::StorageImpl& storage);

template <bool c10::StorageImpl::* Flag>
struct Opens {
  friend bool& throws_on_access(c10::StorageImpl& storage) { return storage.*Flag; }
};
template struct Opens<&c10::StorageImpl::throw_on_immutable_data_ptr_>;

// Despite libtorch's name for it, this leaves the memory where it is.
inline void forbid_access(c10::StorageImpl& storage, const char* message) {
  storage.release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(message));
}

}  // namespace overdrive
