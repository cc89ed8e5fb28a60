#pragma once

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>

namespace overdrive {

// Touching a gigabyte of 4 KiB pages for the first time takes half a second; with pages of 2 MiB, a tenth of that.
inline void advise_huge_pages(void* data, size_t bytes) {
#ifdef MADV_HUGEPAGE
  constexpr uintptr_t kPage = 4096, kWorthwhile = 4 << 20;
  auto start = (reinterpret_cast<uintptr_t>(data) + kPage - 1) / kPage * kPage;
  auto end = (reinterpret_cast<uintptr_t>(data) + bytes) / kPage * kPage;
  if (bytes >= kWorthwhile && end > start) {
    // A failure is ignored: this is only an optimisation.
    (void)madvise(reinterpret_cast<void*>(start), end - start, MADV_HUGEPAGE);
  }
#else
  (void)data, (void)bytes;
#endif
}

}  // namespace overdrive
