//! Training with less memory, at the price of time.
//!
//! [`checkpoint`](checkpoint()) runs a part of the forward pass without keeping what its backward pass needs, and runs
//! it again in the backward pass. The gradients are the same.
//!
//! ```
//! use overdrive_memory::checkpoint;
//! use tch::{Device, Kind, Tensor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let x = Tensor::rand([8, 8], (Kind::Float, Device::Cpu)).set_requires_grad(true);
//! let w = Tensor::rand([8, 8], (Kind::Float, Device::Cpu)).set_requires_grad(true);
//!
//! let weight = w.shallow_clone();                             // the closure owns what it uses
//! let y = checkpoint(move |[x]| x.f_matmul(&weight)?.f_sin(), [&x])?;
//! y.sum(Kind::Float).f_backward()?;                           // calls the closure again
//! assert!(w.grad().defined());
//! # Ok(())
//! # }
//! ```
//!
//! [`SavedTensors`] keeps what operators save in fewer bits, on the host or on disk, [`CpuOffloadOptimizer`] the state of an
//! optimizer on the host. [`AutoMicroBatch`] computes a batch in parts that fit, and [`find_batch_size`] finds a batch that
//! does.
#![forbid(unsafe_code)]

pub mod account;
mod back_off;
pub mod checkpoint;
mod error;
mod layout;
mod offload;
mod saved;

pub use account::{Estimate, LeakCheck, MemoryRecorder, leak_check};
pub use back_off::{AutoMicroBatch, find_batch_size, is_out_of_memory};
pub use checkpoint::{ActivationCheckpoint, Budget, DeterminismCheck, Policy, checkpoint, checkpoint_sequential};
pub use error::MemoryError;
pub use offload::CpuOffloadOptimizer;
pub use saved::{Compression, HooksGuard, SavedTensors, saved_tensors_hooks};
