// Blocks of memory that are files: the system writes them to the disk and drops them from memory as it needs to.
#pragma once

#include <cstddef>

namespace overdrive {

// The folder for the blocks of this thread's new tensors, as a descriptor; -1 for none.
int folder_for_tensors() noexcept;

// A block of zeros in a file of its own, which has no name and ends with the block. Throws where the disk has no room.
void* map_file(int folder, size_t bytes);

void unmap_file(void* data, size_t bytes) noexcept;

}  // namespace overdrive
