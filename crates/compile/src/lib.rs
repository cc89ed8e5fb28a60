//! Training steps compiled ahead of time by PyTorch's Inductor, and run without Python.
//!
//! A step written in Rust is recorded while it runs, operator by operator: forward pass, backward pass and, for a whole
//! step, the optimizer's update. Python compiles the record once, about a minute for a small model; the package is kept in
//! a cache and loaded by libtorch's C++ side from then on.
//!
//! ```no_run
//! use overdrive_compile as compile;
//! use tch::{Device, Kind, Tensor, nn, nn::Module as _};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let vars = nn::VarStore::new(Device::Cpu);
//! let layer = nn::linear(vars.root(), 4, 2, Default::default());
//! let mut loss_of = compile::loss(&vars, |batch| {
//!     Ok(layer.forward(&batch[0]).cross_entropy_for_logits(&batch[1]))
//! });
//!
//! let (x, y) = (Tensor::randn([8, 4], (Kind::Float, Device::Cpu)), Tensor::zeros([8], (Kind::Int64, Device::Cpu)));
//! let loss = loss_of.run(&[x, y])?; // the first two are recorded, and all later ones compiled
//! loss.backward(); // hands the gradients to hooks, DDP and any optimizer
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod cache;
mod error;
mod fingerprint;
mod forward;
mod graph;
mod inputs;
mod loss;
mod options;
mod packages;
mod plans;
mod python;
mod record;
mod room;
mod seed;
mod step;
mod trace;
mod trial;
mod update;
mod varying;

pub use error::{BoxError, CompileError};
pub use forward::{CompiledForward, forward};
pub use loss::{CompiledLoss, LossResult, loss};
pub use options::Options;
pub use packages::{Prepared, explain, prepare};
pub use python::check_compiler;
pub use step::{CompiledStep, step};
