// Pools of CUDA memory that NCCL knows. Follows c10d_nccl.cpp, in the same file when compiled.
#include <ATen/cuda/MemPool.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include "cuda_device.h"

struct od_mem_pool {
  std::shared_ptr<at::cuda::MemPool> pool;
};

namespace {

namespace allocator = c10::cuda::CUDACachingAllocator;

std::shared_ptr<at::cuda::MemPool> new_pool(at::Device device, const od_group* nccl) {
  std::shared_ptr<allocator::CUDAAllocator> source;
  if (nccl != nullptr) {
    source = std::dynamic_pointer_cast<allocator::CUDAAllocator>(nccl_of(*nccl)->getMemAllocator());
    TORCH_CHECK(source, "this NCCL allocates no memory");
  }
  c10::DeviceGuard guard(device);
  // Its destructor ends the process where a scope still uses the pool: then it is leaked.
  return {new at::cuda::MemPool(source), [](at::cuda::MemPool* pool) {
            try {
              if (pool->use_count() == 1) delete pool;
            } catch (...) {
            }
          }};
}

void check_device(const Nccl& nccl, int device) {
  auto bound = nccl.getBoundDeviceId();
  TORCH_CHECK(!bound || bound->index() == device, "the pool is on CUDA device ", device, ", and the group on device ",
              static_cast<int>(bound->index()));
}

}  // namespace

od_status od_mem_pool_new(int32_t device, const od_group* nccl, od_mem_pool** out, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    auto made = std::make_unique<od_mem_pool>();
    made->pool = new_pool(overdrive::cuda_device(device), nccl);
    *out = made.release();
  });
}

void od_mem_pool_free(od_mem_pool* pool) noexcept { delete pool; }

od_status od_mem_pool_begin(const od_mem_pool* pool, od_error* err) noexcept {
  return overdrive::guarded(err, [&] {
    allocator::beginAllocateToPool(pool->pool->device(), pool->pool->id(),
                                   [own = std::this_thread::get_id()](cudaStream_t) {
                                     return std::this_thread::get_id() == own;
                                   });
  });
}

void od_mem_pool_end(const od_mem_pool* pool) noexcept {
  try {
    allocator::endAllocateToPool(pool->pool->device(), pool->pool->id());
    allocator::releasePool(pool->pool->device(), pool->pool->id());
  } catch (...) {
  }
}

od_status od_group_register_pool(const od_group* group, const od_mem_pool* pool, int32_t symmetric,
                                 od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] {
    auto nccl = nccl_of(*group);
    auto device = pool->pool->device();
    check_device(*nccl, device);
    group->group->locked([&] {
      std::shared_ptr<void> kept = pool->pool;
      TORCH_CHECK(std::find(group->pools.begin(), group->pools.end(), kept) == group->pools.end(),
                  "the pool is registered already");
      nccl->connect(cuda(device));
      nccl->registerMemPool(pool->pool.get(), symmetric != 0);
      group->pools.push_back(kept);
    });
  });
}

od_status od_group_deregister_pool(const od_group* group, const od_mem_pool* pool, od_error* err) noexcept {
  return overdrive::between_ranks(err, [&] {
    auto nccl = nccl_of(*group);
    group->group->locked([&] {
      auto place = std::find(group->pools.begin(), group->pools.end(), std::shared_ptr<void>(pool->pool));
      TORCH_CHECK(place != group->pools.end(), "the pool is not registered at this group");
      nccl->deregisterMemPool(pool->pool.get());
      group->pools.erase(place);
    });
  });
}
