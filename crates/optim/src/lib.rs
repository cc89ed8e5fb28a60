//! Optimizers for tch that update all parameters in one call of libtorch's fused kernels.
//!
//! ```
//! use overdrive_core::Optimizer;
//! use overdrive_optim::AdamW;
//! use tch::nn::Module;
//! use tch::{Device, Kind, Tensor, nn};
//!
//! # fn main() -> Result<(), overdrive_core::OptimizerError> {
//! let vs = nn::VarStore::new(Device::Cpu);
//! let model = nn::linear(vs.root(), 4, 1, Default::default());
//! let mut opt = AdamW::builder(vs.trainable_variables()).lr(1e-3).weight_decay(0.01).build()?;
//!
//! model.forward(&Tensor::randn([8, 4], (Kind::Float, Device::Cpu))).square().mean(Kind::Float).backward();
//! opt.step()?;
//! opt.zero_grad()?;
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod adamw;
mod bucket;
mod clip;
mod fused;
mod sgd;
mod step_count;

pub use adamw::{AdamW, AdamWBuilder};
pub use clip::{GradNorm, clip_grad_norm_};
pub use sgd::{Sgd, SgdBuilder};
