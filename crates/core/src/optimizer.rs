//! What a training loop asks of an optimizer.

use std::sync::atomic::{AtomicU64, Ordering};

use tch::Tensor;

use overdrive_ffi::Error as TorchError;

/// Why an optimizer refused or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OptimizerError {
    /// Nothing to optimize.
    #[error("there are no parameters: make the layers before the optimizer, and give it those that require gradients")]
    NoParameters,
    /// A parameter group that does not exist.
    #[error("parameter group {group} does not exist: this optimizer has {groups}")]
    NoSuchGroup {
        /// The group asked for.
        group: usize,
        /// How many there are.
        groups: usize,
    },
    /// An option outside its range.
    #[error("{option} is {found}, but should be {expected}")]
    InvalidOption {
        /// The option's name.
        option: &'static str,
        /// What was given.
        found: f64,
        /// What would be right.
        expected: &'static str,
    },
    /// Parameters that cannot be optimized together, or at all.
    #[error("parameter {index}: {reason}")]
    InvalidParameter {
        /// Its place in the list that was given.
        index: usize,
        /// What is wrong with it, and what would be right.
        reason: String,
    },
    /// [`Optimizer::step_scaled`] on an optimizer that cannot take the scale.
    #[error("this optimizer does not take a gradient scale: unscale the gradients, then call `step`")]
    TakesNoGradScale,
    /// A `GradScaler` on an optimizer whose steps it must not skip; why.
    #[error("this optimizer cannot be used with a GradScaler: {0}")]
    RefusesGradScaler(&'static str),
    /// [`Optimizer::set_momentum`] on an optimizer without one.
    #[error(
        "this optimizer has no momentum to cycle: give it one (SGD's `momentum`, Adam's `betas`), or cycle the learning rate alone"
    )]
    NoMomentum,
    /// The norm of gradients that were to be clipped, where infinity and NaN are to be errors.
    #[error("the {norm_type}-norm of the gradients is {found}: they cannot be clipped, and are as they were")]
    NonFiniteNorm {
        /// Which norm.
        norm_type: f64,
        /// Infinity or NaN.
        found: f64,
    },
    /// An optimizer that communicates could not.
    #[error(transparent)]
    Sync(crate::SyncError),
    /// tch's optimizer panicked; its message.
    #[error("tch's optimizer failed: {0}")]
    Tch(String),
    /// libtorch failed.
    #[error(transparent)]
    Torch(#[from] TorchError),
}

/// Tells optimizers apart within a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OptimizerId(u64);

impl OptimizerId {
    /// An id that no other optimizer has.
    #[allow(clippy::new_without_default)] // two defaults would differ
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // Odd numbers, so that none meets an id made from an address.
        Self(NEXT.fetch_add(1, Ordering::Relaxed) * 2 + 1)
    }

    /// An id made from where the first parameter's data lies, for optimizers that have no place for one of their own.
    ///
    /// Two optimizers that start with the same parameter get the same id.
    pub fn of_first_parameter(params: &[Tensor]) -> Self {
        Self(params.first().map_or(0, |param| param.data_ptr() as u64) & !1)
    }
}

/// The loss scale and the overflow flag that a fused optimizer takes straight from the GPU.
#[derive(Clone, Copy, Debug)]
pub struct GradScale<'a> {
    /// The gradients are to be divided by this float32 scalar; none when they have been unscaled already.
    pub scale: Option<&'a Tensor>,
    /// A float32 scalar, 1 when a gradient is infinite or NaN: the step then changes nothing.
    pub found_inf: &'a Tensor,
}

/// An optimizer: parameters in groups, a learning rate a group, and a step.
///
/// # Source
/// `torch.optim.Optimizer`
pub trait Optimizer {
    /// Tells this optimizer from others; stays the same while it lives.
    fn id(&self) -> OptimizerId;

    /// The parameters of all groups in order, sharing their data with the model.
    fn params(&self) -> Vec<Tensor>;

    /// How many parameter groups there are.
    fn num_groups(&self) -> usize;

    /// A group's learning rate; none where the implementation cannot tell (tch's).
    fn lr(&self, group: usize) -> Option<f64>;

    /// Sets a group's learning rate.
    ///
    /// # Errors
    /// When there is no such group, or the rate is negative or not finite.
    fn set_lr(&mut self, group: usize, lr: f64) -> Result<(), OptimizerError>;

    /// What cyclic schedules move against the learning rate: SGD's `momentum`, or the first of Adam's `betas`. None
    /// where there is no such option, it is not in use (a momentum of 0), or the implementation cannot tell (tch's).
    ///
    /// # Source
    /// `OneCycleLR(cycle_momentum=True)`
    fn momentum(&self, _group: usize) -> Option<f64> {
        None
    }

    /// Sets what [`momentum`](Self::momentum) tells.
    ///
    /// # Errors
    /// When there is no such group, the value is outside [0, 1), or this optimizer has no momentum in use.
    fn set_momentum(&mut self, _group: usize, _momentum: f64) -> Result<(), OptimizerError> {
        Err(OptimizerError::NoMomentum)
    }

    /// Updates the parameters from their gradients; those without one stay as they are.
    ///
    /// # Errors
    /// When libtorch fails, on memory for the first step's state say.
    ///
    /// # Syncs
    /// No, unless the implementation says so.
    fn step(&mut self) -> Result<(), OptimizerError>;

    /// Whether [`step_scaled`](Self::step_scaled) works, so that a `GradScaler` need not wait for the GPU.
    ///
    /// # Source
    /// `_step_supports_amp_scaling`
    fn takes_grad_scale(&self) -> bool {
        false
    }

    /// A step that unscales the gradients itself and does nothing when the flag is set.
    ///
    /// # Errors
    /// As [`step`](Self::step), and [`OptimizerError::TakesNoGradScale`] where unsupported.
    ///
    /// # Syncs
    /// No.
    fn step_scaled(&mut self, _scale: GradScale<'_>) -> Result<(), OptimizerError> {
        Err(OptimizerError::TakesNoGradScale)
    }

    /// Whether a `GradScaler` may unscale this optimizer's gradients and skip its steps: it asks before it does either.
    ///
    /// # Errors
    /// [`OptimizerError::RefusesGradScaler`] where it may not; never, unless the implementation says so.
    fn check_grad_scaler(&self) -> Result<(), OptimizerError> {
        Ok(())
    }

    /// Frees the gradients, or zeroes them where the implementation cannot free them (tch's).
    ///
    /// # Errors
    /// When libtorch fails.
    ///
    /// # Source
    /// `zero_grad(set_to_none=True)`
    fn zero_grad(&mut self) -> Result<(), OptimizerError>;

    /// Takes anew whatever copies of the parameters' values this optimizer keeps, float32 masters say: to be called after
    /// parameters were written to by anything but its steps.
    ///
    /// # Errors
    /// When libtorch fails.
    ///
    /// # Syncs
    /// No.
    fn params_changed(&mut self) -> Result<(), OptimizerError> {
        Ok(())
    }
}

impl OptimizerError {
    /// An error unless `value` is finite and within `[low, high)`.
    ///
    /// # Errors
    /// [`OptimizerError::InvalidOption`]
    pub fn check_range(
        option: &'static str,
        found: f64,
        range: std::ops::Range<f64>,
        expected: &'static str,
    ) -> Result<(), Self> {
        // NaN is in no range.
        if range.contains(&found) { Ok(()) } else { Err(Self::InvalidOption { option, found, expected }) }
    }

    /// An error unless `lr` is a learning rate: finite and not negative.
    ///
    /// # Errors
    /// [`OptimizerError::InvalidOption`]
    pub fn check_lr(lr: f64) -> Result<(), Self> {
        Self::check_range("lr", lr, 0.0..f64::INFINITY, "a finite number of at least 0")
    }
}
