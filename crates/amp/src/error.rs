//! The errors of mixed precision.

use overdrive_core::{OptimizerError, StateError, TorchError};
use tch::{Device, Kind};

/// Why mixed precision refused or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AmpError {
    /// libtorch has no autocast for this device.
    #[error("autocast does not support {device:?}: it works on Cpu, Cuda and Mps")]
    UnsupportedDevice {
        /// The device asked for.
        device: Device,
    },
    /// This machine, or this build of libtorch, lacks the device.
    #[error("{device:?} is missing: libtorch sees {count} CUDA devices on this machine")]
    MissingDevice {
        /// The device asked for.
        device: Device,
        /// How many CUDA devices libtorch sees.
        count: i64,
    },
    /// Autocast casts only to the two 16-bit floats.
    #[error("autocast to {kind:?} is not possible: the dtype should be Half or BFloat16")]
    UnsupportedKind {
        /// The dtype asked for.
        kind: Kind,
    },
    /// A scaler option outside its range.
    #[error("GradScaler's {option} is {found}, but should be {expected}")]
    InvalidOption {
        /// The option's name.
        option: &'static str,
        /// The value given.
        found: f64,
        /// The values allowed.
        expected: &'static str,
    },
    /// `scale` on an undefined tensor.
    #[error("scale got an undefined tensor: pass it the loss")]
    UndefinedOutput,
    /// The scaler was used before `scale`.
    #[error("{call} came before scale: scale the loss and run backward on the result first")]
    NotScaled {
        /// The call that came too early.
        call: &'static str,
    },
    /// `unscale_` twice on one optimizer within a step.
    #[error("unscale_ was already called on this optimizer since the last update: call it once a step")]
    AlreadyUnscaled,
    /// `unscale_` after `step`.
    #[error("unscale_ came after step: call it before, or not at all")]
    UnscaledAfterStep,
    /// A parameter group was added between `unscale_` and `step`.
    #[error(
        "the optimizer got a parameter group after unscale_, whose gradients are still scaled: add it after step, or \
         before unscale_"
    )]
    AddedAfterUnscale,
    /// `step` twice on one optimizer.
    #[error("step was already called on this optimizer since the last update: call update once all have stepped")]
    AlreadyStepped,
    /// No parameter had a gradient.
    #[error("{call} found no gradients: run backward on the scaled loss first")]
    NoGradients {
        /// The call that found nothing.
        call: &'static str,
    },
    /// Float16 gradients lose bits when they are unscaled.
    #[error(
        "parameter {parameter} has a float16 gradient, which cannot be unscaled: keep the parameters in float32 and \
         let autocast do the casting"
    )]
    HalfGradient {
        /// The parameter's name, or its index in the optimizer.
        parameter: String,
    },
    /// The saved state of a disabled scaler.
    #[error("the scaler's state is empty: it was saved from a disabled GradScaler, and this one is enabled")]
    EmptyState,
    /// The optimizer failed.
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),
    /// A saved state that does not fit this scaler.
    #[error(transparent)]
    State(#[from] StateError),
    /// libtorch failed.
    #[error(transparent)]
    Torch(#[from] TorchError),
}

impl From<tch::TchError> for AmpError {
    fn from(error: tch::TchError) -> Self {
        Self::Torch(error.into())
    }
}
