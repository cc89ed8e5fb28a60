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
    /// **Not run on a GPU.** On the stand-in, what is registered and taken back is tested, not what NCCL makes of it.
    ///
    /// # Errors
    /// When this group is not over NCCL, on another device or has ended, the pool is registered already, or NCCL fails. The pool
    /// is then not registered.
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

    /// Takes a pool's memory back from this group's communicator.
    ///
    /// # Errors
    /// When the pool is not registered at this group, the group has ended or its work has failed, or NCCL fails. The group keeps
    /// the pool then.
    ///
    /// # Syncs
    /// Waits until the group's collectives are done, at most its timeout.
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
