#include <cstdlib>

extern "C" int read_freed_in_cpp() noexcept {
  volatile int* freed = static_cast<int*>(std::calloc(1, sizeof(int)));
  std::free(const_cast<int*>(freed));
  return *freed;
}
