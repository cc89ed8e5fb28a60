//! Memory that NCCL knows.

use overdrive_ffi::c10d::MemPool;
use tch::Device;

use super::ProcessGroup;
use crate::error::DdpError;

const NO_GPU: &str = "only a group over NCCL has a communicator at which memory is registered";

impl ProcessGroup {
    /// A pool of this rank's GPU whose memory NCCL allocates, to be [registered](Self::register_mem_pool).
    ///
    /// # Errors
    /// When this group is not over NCCL, or libtorch takes NCCL for too old: it says so of every GPU that cannot multicast.
    ///
    /// # Source
    /// `torch.cuda.MemPool(backend.mem_allocator)`
    pub fn mem_pool(&self) -> Result<MemPool, DdpError> {
        let Device::Cuda(device) = self.device() else { return Err(unsupported("mem_pool")) };
        MemPool::of_nccl(self.engine(), device).map_err(|source| DdpError::between(self.context("mem_pool"), source))
    }

    /// Registers a pool's memory at this group's communicator: what the pool has now, and what it gets later. Collectives on
    /// its tensors then need no copies within NCCL, where links and switches allow that. With `symmetric`, all ranks have the
    /// same tensors at the same offsets, in a pool of [`mem_pool`](Self::mem_pool), and NCCL may use kernels that write to
    /// the other GPUs. The group keeps the pool until it is deregistered.
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
    /// group.register_mem_pool(&pool, false)?;
    /// group.all_reduce(&mut gradients, ReduceOp::Sum)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// **Not measured on a GPU.** On the stand-in the calls, their errors and the lifetimes are tested, but libtorch registers
    /// nothing at the stand-in's NCCL: that memory reaches NCCL is still to be shown on a GPU.
    ///
    /// # Errors
    /// When this group is not over NCCL or on another device, the pool is registered already, or NCCL fails.
    ///
    /// # Syncs
    /// Waits for all ranks where the communicator is not there yet, which is before the first collective.
    ///
    /// # Source
    /// `register_mem_pool` of `ProcessGroupNCCL`
    pub fn register_mem_pool(&self, pool: &MemPool, symmetric: bool) -> Result<(), DdpError> {
        let Device::Cuda(_) = self.device() else { return Err(unsupported("register_mem_pool")) };
        let registered = self.engine().register_mem_pool(pool, symmetric);
        registered.map_err(|source| DdpError::between(self.context("register_mem_pool"), source))
    }

    /// Takes a pool's memory back from this group's communicator.
    ///
    /// # Errors
    /// When the pool is not registered at this group, or NCCL fails.
    ///
    /// # Source
    /// `deregister_mem_pool` of `ProcessGroupNCCL`
    pub fn deregister_mem_pool(&self, pool: &MemPool) -> Result<(), DdpError> {
        let Device::Cuda(_) = self.device() else { return Err(unsupported("deregister_mem_pool")) };
        let taken = self.engine().deregister_mem_pool(pool);
        taken.map_err(|source| DdpError::between(self.context("deregister_mem_pool"), source))
    }
}

fn unsupported(op: &'static str) -> DdpError {
    DdpError::Unsupported { op, reason: NO_GPU.to_owned() }
}
