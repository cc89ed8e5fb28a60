//! Data-parallel training on libtorch's own engine: process groups, collectives, `DistributedDataParallel`.
//!
//! Each rank is a process with a copy of the model. A launcher starts the ranks and tells each its number; they meet,
//! and train on parts of each batch. libtorch's own code averages their gradients, over NCCL on GPUs and Gloo on CPUs,
//! so a rank here can train together with one in Python.
//!
//! ```no_run
//! use overdrive_ddp::{Backend, DistributedDataParallel, InitMethod, ReduceOp, init_process_group};
//! use tch::{Device, Kind, Tensor, nn, nn::Module};
//!
//! # fn main() -> Result<(), overdrive_ddp::DdpError> {
//! let group = init_process_group(Backend::Gloo, InitMethod::Auto)?;
//! let mut total = Tensor::from(group.rank() as i64);
//! group.all_reduce(&mut total, ReduceOp::Sum)?;
//!
//! let vs = nn::VarStore::new(Device::Cpu);
//! let model = nn::linear(vs.root(), 4, 1, Default::default());
//! let ddp = DistributedDataParallel::new(&vs, &group)?;
//! let inputs = Tensor::randn([8, 4], (Kind::Float, Device::Cpu));
//! let loss = ddp.forward(|| model.forward(&inputs))?.square().mean(Kind::Float);
//! ddp.backward(&loss)?; // the gradients are now the mean over ranks
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod check;
mod collectives;
mod ddp;
mod device;
mod end;
mod error;
mod group;
pub mod hooks;
mod local_sgd;
mod node_check;
mod one_bit_adam;
mod ranks;
mod rendezvous;
mod signed_mean;
mod spawn;
mod sync_batch_norm;
mod work;

pub use collectives::P2pOp;
pub use ddp::{
    BufferHookLocation, DdpBuilder, DistributedDataParallel, JoinOptions, Joinable, MixedPrecision, NoSync, Outputs,
};
pub use error::{Context, DdpError};
pub use group::{
    Backend, DEFAULT_NCCL_TIMEOUT, DEFAULT_TIMEOUT, ProcessGroup, ProcessGroupBuilder, init_process_group,
};
pub use hooks::{CommHook, GradBucket};
pub use local_sgd::ModelAverager;
pub use node_check::{NodeCheckOptions, NodeReport, check_node};
pub use one_bit_adam::{OneBitAdam, OneBitAdamOptions};
pub use overdrive_ffi::c10d::{
    GroupFailure, MemPool, MemPoolGuard, ReduceOp, Store, TcpStoreOptions, flight_record, nccl_is_compiled,
};
pub use overdrive_launch::LaunchError;
pub use rendezvous::InitMethod;
pub use spawn::spawn;
pub use sync_batch_norm::SyncBatchNorm;
pub use work::Work;
