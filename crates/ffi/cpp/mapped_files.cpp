#include <atomic>
#include <cerrno>
#include <climits>
#include <cstring>
#include <string>

#include <c10/util/Exception.h>

#include "guarded.h"
#include "mapped_files.h"

#ifdef __linux__
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace {

thread_local int folder_ = -1;

}  // namespace

int overdrive::folder_for_tensors() noexcept { return folder_; }

int32_t od_host_memory_in_folder(int32_t folder) noexcept {
  int before = folder_;
  folder_ = folder;
  return before;
}

#ifdef __linux__

namespace {

std::string name_of(int folder) {
  char path[PATH_MAX];
  auto link = "/proc/self/fd/" + std::to_string(folder);
  auto length = readlink(link.c_str(), path, sizeof path);
  return length < 0 ? "the folder" : std::string(path, length);
}

// is_file_failure (guarded.h) and error.rs recognise the text.
[[noreturn]] void refuse(int folder, size_t bytes, int error) {
  TORCH_CHECK(false, "no file of ", bytes, " bytes for a tensor in ", name_of(folder), ": ", std::strerror(error));
}

// A file without a name.
int open_file(int folder) {
  int file = openat(folder, ".", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600);
  // Some file systems do not support that. There a file is made with a name, which is removed at once.
  if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR)) return file;
  static std::atomic<uint64_t> number{0};
  auto name = "tensor-" + std::to_string(getpid()) + "-" + std::to_string(number++);
  file = openat(folder, name.c_str(), O_CREAT | O_EXCL | O_RDWR | O_CLOEXEC, 0600);
  if (file >= 0) unlinkat(folder, name.c_str(), 0);
  return file;
}

}  // namespace

void* overdrive::map_file(int folder, size_t bytes) {
  int file = open_file(folder);
  if (file < 0) refuse(folder, bytes, errno);
  // Allocates the blocks on the disk now. Otherwise a write to a page for which the disk has no room would end the
  // process later.
  int error;
  // On some file systems, a signal interrupts it.
  do error = posix_fallocate(file, 0, static_cast<off_t>(bytes));
  while (error == EINTR);
  void* data = MAP_FAILED;
  if (error == 0) {
    data = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    error = data == MAP_FAILED ? errno : 0;
  }
  close(file);
  if (error != 0) refuse(folder, bytes, error);
  return data;
}

void overdrive::unmap_file(void* data, size_t bytes) noexcept { munmap(data, bytes); }

void od_host_memory_read_ahead(const void* data, size_t bytes) noexcept {
  auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  auto from = reinterpret_cast<uintptr_t>(data) / page * page;
  // It may fail, for memory that is in no file.
  if (bytes > 0) madvise(reinterpret_cast<void*>(from), reinterpret_cast<uintptr_t>(data) + bytes - from, MADV_WILLNEED);
}

#else

void* overdrive::map_file(int, size_t) { TORCH_CHECK(false, "tensors in files need Linux"); }

void overdrive::unmap_file(void*, size_t) noexcept {}

void od_host_memory_read_ahead(const void*, size_t) noexcept {}

#endif
