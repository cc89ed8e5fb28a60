//! Gradient accumulation that equals the large batch, however uneven the micro-batches are.
//!
//! A mean loss over each micro-batch and a fixed `1/k` weight every sample of a small micro-batch too heavily. Here
//! each loss is weighted by the samples (or tokens) it averages over, and the divisor is the window's actual total,
//! summed over all ranks.
//!
//! ```
//! use overdrive_accum::{Accumulator, Samples};
//! use overdrive_core::{Optimizer, TchOptimizer};
//! use tch::nn::{Module, OptimizerConfig};
//! use tch::{Device, Kind, Tensor, nn};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let vs = nn::VarStore::new(Device::Cpu);
//! let model = nn::linear(vs.root(), 4, 1, Default::default());
//! let mut opt = TchOptimizer::new(nn::Sgd::default().build(&vs, 0.1)?);
//! let data = Tensor::randn([10, 4], (Kind::Float, Device::Cpu));
//!
//! let mut accum = Accumulator::new(2)?;
//! for micro in accum.windows(data.split(4, 0)) {             // 4, 4 | 2: the last window is partial
//!     let loss = model.forward(&micro.batch).square().mean(Kind::Float);
//!     accum.backward(&opt, &loss, Samples(micro.batch.size()[0]), micro.closes)?;
//!     if micro.closes {
//!         opt.step()?;
//!         opt.zero_grad()?;
//!     }
//! }
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod accumulator;
mod count;
mod noise_scale;
mod windows;

pub use accumulator::{AccumError, Accumulator};
pub use count::Count::{self, Samples, Tokens};
pub use noise_scale::GradientNoiseScale;
pub use windows::{MicroBatch, Windows};
