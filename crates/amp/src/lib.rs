//! Automatic mixed precision for tch: [`autocast`] picks the dtype of each operator, [`GradScaler`] keeps float16
//! gradients from underflowing to zero.
//!
//! ```
//! use overdrive_amp::{GradScaler, autocast};
//! use overdrive_core::TchOptimizer;
//! use tch::nn::{Module, OptimizerConfig};
//! use tch::{Device, Kind, Tensor, nn};
//!
//! # fn main() -> Result<(), overdrive_amp::AmpError> {
//! let vs = nn::VarStore::new(Device::Cpu);
//! let model = nn::linear(vs.root(), 4, 2, Default::default());
//! let mut opt = TchOptimizer::new(nn::Sgd::default().build(&vs, 0.1).expect("a valid learning rate"));
//! let mut scaler = GradScaler::new(Device::Cpu);
//!
//! let inputs = Tensor::randn([8, 4], (Kind::Float, Device::Cpu));
//! let loss = autocast(Device::Cpu, Kind::BFloat16, || model.forward(&inputs).square().mean(Kind::Float))?;
//! scaler.scale(&loss)?.backward();
//! let outcome = scaler.step(&mut opt)?;
//! scaler.update()?;
//! assert!(!outcome.skipped()?);
//! # Ok(())
//! # }
//! ```
#![forbid(unsafe_code)]

mod autocast;
mod error;
mod grad_scaler;
mod scaler_options;
mod unscale;

pub use autocast::{Autocast, AutocastGuard, autocast, autocast_state};
pub use error::AmpError;
pub use grad_scaler::{GradScaler, StepOutcome};
pub use overdrive_ffi::autocast::State as AutocastState;
pub use scaler_options::GradScalerBuilder;
