//! Pools of CUDA memory, which NCCL can register.

use std::marker::PhantomData;
use std::ptr::{self, NonNull};

use super::group::ProcessGroup;
use crate::error::{Error, check};
use crate::raw_c10d as raw;

/// A part of the caching allocator's memory of one GPU that only chosen tensors use. Tensors keep their memory when the pool
/// is dropped; the rest of it is freed.
///
/// A GPU has not run it: on the stand-in for one, scopes and lifetimes are tested.
///
/// # Source
/// `torch.cuda.MemPool`
#[derive(Debug)]
pub struct MemPool {
    handle: NonNull<raw::MemPool>,
    device: usize,
}

// SAFETY: libtorch's allocator locks around its pools, and nothing else of one changes.
unsafe impl Send for MemPool {}
// SAFETY: as above.
unsafe impl Sync for MemPool {}

impl MemPool {
    /// A pool on a GPU.
    ///
    /// # Errors
    /// When there is no such device, or this was built without NCCL.
    pub fn new(device: usize) -> Result<Self, Error> {
        Self::made(device, ptr::null())
    }

    /// A pool on a GPU whose memory NCCL allocates (`ncclMemAlloc`), as it has to be where switches sum (NVLS).
    ///
    /// # Errors
    /// When there is no such device, or the group is not over NCCL.
    ///
    /// # Source
    /// `torch.cuda.MemPool(backend.mem_allocator)`
    pub fn of_nccl(group: &ProcessGroup, device: usize) -> Result<Self, Error> {
        Self::made(device, group.as_ptr())
    }

    fn made(device: usize, nccl: *const raw::Group) -> Result<Self, Error> {
        let number =
            i32::try_from(device).map_err(|_| Error::refused(format!("no CUDA device has the number {device}")))?;
        let mut out = ptr::null_mut();
        // SAFETY: the group is null or live.
        check(|err| unsafe { raw::od_mem_pool_new(number, nccl, &mut out, err) })?;
        let handle = NonNull::new(out).ok_or_else(|| Error::refused("libtorch returned no pool"))?;
        Ok(Self { handle, device })
    }

    /// The GPU's number.
    pub fn device(&self) -> usize {
        self.device
    }

    /// Until the guard is dropped, what this thread allocates on the GPU comes from this pool; also after a panic.
    ///
    /// Keep the guard around allocations only. While it lives, libtorch gives no cached memory of the device back, on no
    /// thread, also where an allocation fails. Backward passes allocate on other threads, so not in the pool.
    ///
    /// # Errors
    /// When a guard of this pool lives already.
    ///
    /// # Source
    /// `torch.cuda.use_mem_pool`
    #[doc(alias = "use_mem_pool")]
    pub fn begin(&self) -> Result<MemPoolGuard<'_>, Error> {
        // SAFETY: the handle is live.
        check(|err| unsafe { raw::od_mem_pool_begin(self.as_ptr(), err) })?;
        Ok(MemPoolGuard { pool: self, _of_this_thread: PhantomData })
    }

    pub(crate) fn as_ptr(&self) -> *const raw::MemPool {
        self.handle.as_ptr()
    }
}

impl Drop for MemPool {
    fn drop(&mut self) {
        // SAFETY: the handle is ours, and not used after this.
        unsafe { raw::od_mem_pool_free(self.handle.as_ptr()) }
    }
}

/// Allocations of this thread come from a [`MemPool`] while it lives.
#[derive(Debug)]
#[must_use = "allocations come from the pool only while the guard lives"]
pub struct MemPoolGuard<'a> {
    pool: &'a MemPool,
    _of_this_thread: PhantomData<*const ()>,
}

impl Drop for MemPoolGuard<'_> {
    fn drop(&mut self) {
        // SAFETY: the pool is live, and this thread has begun.
        unsafe { raw::od_mem_pool_end(self.pool.as_ptr()) }
    }
}

impl ProcessGroup {
    /// Registers a pool's memory at this group's communicator: what the pool has now, and, before each collective, what it has
    /// got since. Collectives on its tensors then need no copies within NCCL where links and switches allow. The group keeps
    /// the pool until it is deregistered or the group is [closed](Self::close); where the communicator is aborted, the process
    /// keeps it until it ends, because other ranks may still write to it.
    ///
    /// Every rank has to register and deregister the same memory between the same collectives, and to pass it to the same ones:
    /// NCCL calls anything else undefined, and may wait without a limit. So a collective fails on this rank where new memory
    /// cannot be registered before it, and the group's work has failed then. With `max_split_size_mb`, an allocation in the
    /// pool that finds no memory frees blocks of it that are registered.
    ///
    /// # Errors
    /// When the group is not over NCCL, on another device or has ended, the pool is registered already or in expandable
    /// segments, `TORCH_NCCL_BLOCKING_WAIT` is set, or NCCL fails. The pool is then not registered.
    ///
    /// # Syncs
    /// Waits for all members where the communicator is not there yet.
    ///
    /// # Source
    /// `ProcessGroupNCCL::registerMemPool`, without `symm`
    pub fn register_mem_pool(&self, pool: &MemPool) -> Result<(), Error> {
        // SAFETY: both handles are live, and the group keeps the pool's memory.
        check(|err| unsafe { raw::od_group_register_pool(self.as_ptr(), pool.as_ptr(), err) })
    }

    /// Takes a pool's memory back from the communicator, on every rank between the same collectives.
    ///
    /// # Errors
    /// When the pool is not registered at this group, the group has ended or its work has failed, or NCCL fails. The group keeps
    /// the pool then, and what NCCL has given back is registered again before the next collective.
    ///
    /// # Syncs
    /// Waits until the group's collectives are done, at most its timeout. Then NCCL asks the ranks whose memory this one has
    /// mapped, and waits for their answers without a limit.
    ///
    /// # Source
    /// `ProcessGroupNCCL::deregisterMemPool`
    pub fn deregister_mem_pool(&self, pool: &MemPool) -> Result<(), Error> {
        // SAFETY: both handles are live.
        check(|err| unsafe { raw::od_group_deregister_pool(self.as_ptr(), pool.as_ptr(), err) })
    }
}
