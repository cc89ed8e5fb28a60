// NCCL, where libtorch has CUDA and its headers and NCCL's are found.
#define USE_C10D_NCCL 1

#include <torch/csrc/distributed/c10d/ProcessGroupNCCL.hpp>

#include "c10d_backends.h"

int32_t od_nccl_compiled(void) noexcept { return 1; }

namespace overdrive {

c10::intrusive_ptr<c10d::Backend> new_nccl(const c10::intrusive_ptr<c10d::Store>& store,
                                           const od_group_options& options) {
  auto nccl = c10d::ProcessGroupNCCL::Options::create();
  nccl->timeout = std::chrono::milliseconds(options.timeout_ms);
  nccl->group_name = options.name;
  nccl->global_ranks_in_group.assign(options.global_ranks, options.global_ranks + options.size);
  auto backend = c10::make_intrusive<c10d::ProcessGroupNCCL>(store, options.rank, options.size, nccl);
  backend->setSequenceNumberForGroup();
  return backend;
}

}  // namespace overdrive
