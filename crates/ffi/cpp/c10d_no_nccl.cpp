// Replaces c10d_nccl.cpp where libtorch has no CUDA or the headers are missing.
#include "c10d_backends.h"
#include "c10d_registrations.h"
#include "guarded.h"

int32_t od_nccl_compiled(void) noexcept { return 0; }

namespace overdrive {

c10::intrusive_ptr<c10d::Backend> new_nccl(const c10::intrusive_ptr<c10d::Store>&, const od_group_options&) {
  TORCH_CHECK(false, "built without NCCL: libtorch has no CUDA, or CUDA's or NCCL's headers were not found at build "
                     "time (run `cargo xtask setup` and build again, or use Gloo)");
}

void split_none(const od_group&, int32_t) { TORCH_CHECK(false, "built without NCCL: there is nothing to split"); }

bool nccl_is_idle(c10d::Backend&) { return true; }

void nccl_outlives_failures(c10d::Backend&) {}

std::shared_ptr<Registrations> new_registrations() { return nullptr; }

std::string nccl_record(bool) { TORCH_CHECK(false, "built without NCCL: it has no record"); }

}  // namespace overdrive

namespace {

constexpr const char* NO_POOLS = "built without NCCL: there are no pools of its memory";

}  // namespace

od_status od_mem_pool_new(int32_t, const od_group*, od_mem_pool**, od_error* err) noexcept {
  return overdrive::guarded(err, [] { TORCH_CHECK(false, NO_POOLS); });
}

void od_mem_pool_free(od_mem_pool*) noexcept {}

od_status od_mem_pool_begin(const od_mem_pool*, od_error* err) noexcept {
  return overdrive::guarded(err, [] { TORCH_CHECK(false, NO_POOLS); });
}

void od_mem_pool_end(const od_mem_pool*) noexcept {}

od_status od_group_register_pool(const od_group*, const od_mem_pool*, od_error* err) noexcept {
  return overdrive::guarded(err, [] { TORCH_CHECK(false, NO_POOLS); });
}

od_status od_group_deregister_pool(const od_group*, const od_mem_pool*, od_error* err) noexcept {
  return overdrive::guarded(err, [] { TORCH_CHECK(false, NO_POOLS); });
}
