// Replaces c10d_nccl.cpp where libtorch has no CUDA or the headers are missing.
#include "c10d_backends.h"

int32_t od_nccl_compiled(void) noexcept { return 0; }

namespace overdrive {

c10::intrusive_ptr<c10d::Backend> new_nccl(const c10::intrusive_ptr<c10d::Store>&, const od_group_options&) {
  TORCH_CHECK(false, "built without NCCL: libtorch has no CUDA, or CUDA's or NCCL's headers were not found at build "
                     "time (run `cargo xtask setup` and build again, or use Gloo)");
}

void split_none(const od_group&, int32_t) { TORCH_CHECK(false, "built without NCCL: there is nothing to split"); }

bool nccl_is_idle(c10d::Backend&) { return true; }

void nccl_outlives_failures(c10d::Backend&) {}

std::string nccl_record(bool) { TORCH_CHECK(false, "built without NCCL: it has no record"); }

}  // namespace overdrive
