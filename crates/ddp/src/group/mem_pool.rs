//! Memory that NCCL knows.

use overdrive_ffi::c10d::MemPool;

use super::{Backend, ProcessGroup};
use crate::error::DdpError;

impl ProcessGroup {
    /// A pool of this rank's GPU whose memory NCCL allocates, to be [registered](Self::register_mem_pool).
    ///
    /// # Errors
    /// When this group is not over NCCL, or libtorch takes NCCL for too old: it says so of every GPU that cannot multicast.
    ///
    /// # Source
    /// `torch.cuda.MemPool(backend.mem_allocator)`
    pub fn mem_pool(&self) -> Result<MemPool, DdpError> {
        let op = "mem_pool";
        self.check_nccl(op)?;
        let device = self.0.settings.cuda_device.unwrap_or(0);
        MemPool::of_nccl(self.engine(), device).map_err(|source| DdpError::between(self.context(op), source))
    }

    /// Registers a pool's memory at this group's communicator: what the pool has now, and, before each collective, what it has
    /// got since. Collectives on its tensors then need no copies within NCCL, where links and switches allow that.
    ///
    /// The group keeps the pool until it is deregistered or the group is [closed](Self::close), or dropped without a failure.
    /// Where the communicator is aborted, by [`abort`](Self::abort) or because work has failed, the pool is kept until the
    /// process ends, because other ranks may still write to its memory.
    ///
    /// ```no_run
    /// # use overdrive_ddp::{Backend, InitMethod, ReduceOp, init_process_group};
    /// # use tch::{Kind, Tensor};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// let group = init_process_group(Backend::Nccl, InitMethod::Auto)?;
    /// let pool = group.mem_pool()?;
    /// let mut gradients = {
    ///     let _pool = pool.begin()?; // until the end of this scope, tensors are in the pool
    ///     Tensor::zeros([1 << 20], (Kind::Float, group.device()))
    /// };
    /// group.register_mem_pool(&pool)?;
    /// group.all_reduce(&mut gradients, ReduceOp::Sum)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// PyTorch registers new memory while it is allocated, and has `symm=True`, for windows that all ranks register together.
    /// There are none here: a rank that is missing would hold up the others, and an abort too.
    ///
    /// # All ranks alike
    /// Every rank has to register and deregister the same memory, in the same order, between the same collectives, and to pass
    /// registered memory to the same collectives, in and out. NCCL calls it undefined where only some ranks do; in 2.28.9, with
    /// NVLS, those that do wait for the others without a limit. So a collective fails on this rank where new memory cannot be
    /// registered before it, and the group's work has failed then. With `max_split_size_mb`, an allocation in a registered pool
    /// that finds no memory frees blocks of it while they are registered.
    ///
    /// # Waits that nothing ends
    /// Two waits within NCCL 2.28.9 (from its source, not run) end by no timeout and by no [`abort`](Self::abort). PyTorch has
    /// them too. Register memory where a launcher ends all ranks when one is gone, and where a rank that stands still may hold
    /// up the others.
    /// - On hosts whose switches sum (NVLS), ranks of a host meet before each collective on registered memory, in the call that
    ///   begins it. Where one is dead or stands still, `all_reduce_async` does not return, so no watchdog knows of the
    ///   collective.
    /// - Giving back memory that other ranks of the host have mapped asks their processes, in
    ///   [`deregister_mem_pool`](Self::deregister_mem_pool), at the group's end, and before a collective where the pool has freed
    ///   some. Where one stands still, the call does not return; [`close`](Self::close) does, at its timeout.
    ///
    /// **Not run on a GPU.** On the stand-in, what is registered and taken back is tested, not what NCCL makes of it.
    ///
    /// # Errors
    /// When this group is not over NCCL, on another device or has ended, the pool is registered already, or NCCL fails. When the
    /// pool is in expandable segments, which grow while NCCL uses them (in those that it gets later, each collective fails), or
    /// `TORCH_NCCL_BLOCKING_WAIT` is set, with which nobody knows when NCCL no longer uses it. The pool is then not registered.
    ///
    /// # Syncs
    /// Waits for all ranks where the communicator is not there yet, which is before the first collective.
    ///
    /// # Source
    /// `register_mem_pool` of `ProcessGroupNCCL`
    pub fn register_mem_pool(&self, pool: &MemPool) -> Result<(), DdpError> {
        let op = "register_mem_pool";
        self.check_nccl(op)?;
        self.engine().register_mem_pool(pool).map_err(|source| DdpError::between(self.context(op), source))
    }

    /// Takes a pool's memory back from this group's communicator: on every rank between the same two collectives, see
    /// [`register_mem_pool`](Self::register_mem_pool).
    ///
    /// # Errors
    /// When the pool is not registered at this group, the group has ended or its work has failed, or NCCL fails. The group keeps
    /// the pool then, and what NCCL has given back is registered again before the next collective.
    ///
    /// # Syncs
    /// Waits until the group's collectives are done, at most its timeout. Then NCCL may wait for other ranks without a limit.
    ///
    /// # Source
    /// `deregister_mem_pool` of `ProcessGroupNCCL`
    pub fn deregister_mem_pool(&self, pool: &MemPool) -> Result<(), DdpError> {
        let op = "deregister_mem_pool";
        self.check_nccl(op)?;
        self.engine().deregister_mem_pool(pool).map_err(|source| DdpError::between(self.context(op), source))
    }

    fn check_nccl(&self, op: &'static str) -> Result<(), DdpError> {
        if self.0.backend != Backend::Gloo {
            return Ok(());
        }
        let reason = "only a group over NCCL has a communicator at which memory is registered".to_owned();
        Err(DdpError::Unsupported { op, reason })
    }
}
