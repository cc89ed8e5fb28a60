//! What a training loop needs from an optimizer.

use std::sync::atomic::{AtomicU64, Ordering};

use tch::Tensor;

use overdrive_ffi::Error as TorchError;

use crate::parameter::Parameter;
use crate::ranks::SkipAgreement;
use crate::state::Stateful;

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
    #[error("parameter {parameter}: {reason}")]
    InvalidParameter {
        /// Its name, or its place in the list that was given ([`Parameter::label`]).
        parameter: String,
        /// What is wrong with it, and what would be right.
        reason: String,
    },
    /// [`Optimizer::step_scaled`] on an optimizer that cannot take the scale.
    #[error("this optimizer does not take a gradient scale: unscale the gradients, then call `step`")]
    TakesNoGradScale,
    /// A part that cannot be used with this optimizer, and why.
    #[error("{part} cannot be used with this optimizer: {reason}")]
    DoesNotFit {
        /// The part that was joined with the optimizer.
        part: &'static str,
        /// Why they do not fit, and what does.
        reason: &'static str,
    },
    /// A part of the program was called at the wrong time, or can no longer be used. No optimizer is at fault.
    #[error("{part} cannot go on: {reason}")]
    NotNow {
        /// The part that was called.
        part: &'static str,
        /// Why, and what to do.
        reason: &'static str,
    },
    /// [`Optimizer::set_momentum`] on an optimizer without momentum.
    #[error(
        "this optimizer has no momentum to cycle: give it one (SGD's `momentum`, Adam's `betas`), or cycle the learning rate alone"
    )]
    NoMomentum,
    /// Options that need state which the parameter group does not have.
    #[error(
        "these options need state that the group does not have (amsgrad's maxima, or a momentum buffer): set them when \
         the optimizer is built"
    )]
    OtherState,
    /// [`Optimizer::step`] on an optimizer whose steps evaluate the loss (L-BFGS).
    #[error("a step of this optimizer evaluates the loss several times: call `step_with` with a closure that does")]
    NeedsClosure,
    /// A step of an optimizer in evaluation mode (a schedule-free one).
    #[error("this optimizer is in evaluation mode, where the weights are averages: call its `train` before a step")]
    InEvaluation,
    /// The norm of gradients that were to be clipped, where infinity and NaN are to be errors.
    #[error("the {norm_type}-norm of the gradients is {found}: they cannot be clipped and are unchanged")]
    NonFiniteNorm {
        /// Which norm.
        norm_type: f64,
        /// Infinity or NaN.
        found: f64,
    },
    /// Communication between ranks failed in an optimizer's step.
    #[error(transparent)]
    Sync(crate::SyncError),
    /// tch's optimizer panicked; its message.
    #[error("tch's optimizer failed: {0}")]
    Tch(String),
    /// libtorch failed.
    #[error(transparent)]
    Torch(#[from] TorchError),
}

/// Identifies an optimizer within a process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct OptimizerId(u64);

impl OptimizerId {
    /// An id that no other optimizer has.
    #[allow(clippy::new_without_default)] // two defaults would differ
    pub fn new() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The loss scale and the overflow flag that a fused optimizer takes straight from the GPU.
#[derive(Clone, Copy, Debug)]
pub struct GradScale<'a> {
    /// The gradients are to be divided by this float32 scalar; `None` when they have been unscaled already.
    pub scale: Option<&'a Tensor>,
    /// A float32 scalar, 1 when a gradient is infinite or NaN: the step then changes nothing.
    pub found_inf: &'a Tensor,
}

/// What an optimizer does besides updating its parameters in [`Optimizer::step`]. Code that combines an optimizer with
/// another part checks this, and refuses a combination that cannot work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Behavior {
    /// It updates parameters and frees gradients during the backward pass: nothing can look at the gradients before,
    /// add to them, or skip the step.
    pub steps_in_backward: bool,
    /// Between the backward passes of one step the parameters hold other values than the trained ones (SAM's ascent).
    pub moves_parameters: bool,
    /// It keeps copies of the parameters' values, and must be notified when weights were loaded
    /// ([`Optimizer::params_changed`]).
    pub keeps_copies: bool,
    /// Its state holds an average of the parameters, which [`Optimizer::params_changed`] begins anew.
    pub keeps_average: bool,
    /// Its steps wait for the other ranks: a step must be skipped on all of them or on none.
    pub communicates: bool,
    /// Of an optimizer that communicates: it takes gradients that are averaged already, and does not average them
    /// itself.
    pub takes_averages: bool,
    /// The step of a parameter depends on the gradients or values of others (Prodigy's distance, LAMB's clipping,
    /// L-BFGS): over a part of the parameters it makes other steps.
    pub couples_parameters: bool,
    /// The step of an element depends on others of its parameter (Muon's and Adafactor's matrices, the norms of LAMB and
    /// LARS, blocks of 8 bits): over a part of a parameter it makes other steps.
    pub couples_elements: bool,
}

impl Behavior {
    /// What either of two parts does: a wrapper and the optimizer inside it, for instance.
    pub fn and(self, other: Self) -> Self {
        Self {
            steps_in_backward: self.steps_in_backward || other.steps_in_backward,
            moves_parameters: self.moves_parameters || other.moves_parameters,
            keeps_copies: self.keeps_copies || other.keeps_copies,
            keeps_average: self.keeps_average || other.keeps_average,
            communicates: self.communicates || other.communicates,
            takes_averages: self.takes_averages || other.takes_averages,
            couples_parameters: self.couples_parameters || other.couples_parameters,
            couples_elements: self.couples_elements || other.couples_elements,
        }
    }
}

/// An optimizer: parameters in groups, a learning rate a group, and a step.
///
/// # Source
/// `torch.optim.Optimizer`
pub trait Optimizer {
    /// Identifies this optimizer; stays the same as long as it exists.
    fn id(&self) -> OptimizerId;

    /// The parameters of all groups in order, sharing their data with the model.
    fn params(&self) -> Vec<Tensor>;

    /// The same parameters with their names, where the optimizer was given names.
    fn parameters(&self) -> Vec<Parameter> {
        self.params().into_iter().map(Parameter::unnamed).collect()
    }

    /// The tensors that its steps update, one for each parameter: the parameter itself, or the float32 copy kept of it.
    ///
    /// # Errors
    /// When libtorch fails.
    fn trained(&self) -> Result<Vec<Tensor>, OptimizerError> {
        Ok(self.params())
    }

    /// What it does besides updating its parameters in [`step`](Self::step).
    fn behavior(&self) -> Behavior {
        Behavior::default()
    }

    /// How many parameter groups there are.
    fn num_groups(&self) -> usize;

    /// How many parameters each group has, in the order of [`params`](Self::params); `None` where the implementation
    /// cannot tell (tch's).
    fn group_lens(&self) -> Option<Vec<usize>> {
        None
    }

    /// A number that grows when groups, options or tensors of the state may have been replaced. Steps, learning rates
    /// and [`momentum`](Self::momentum) do not count. `None` where the implementation cannot tell, or where its steps
    /// are not all the same operators (Lookahead's, each k-th of which does more): then nothing may be kept that relies
    /// on them, and a compiled step leaves the update as it is.
    fn revision(&self) -> Option<u64> {
        None
    }

    /// A group's learning rate; `None` where the implementation cannot read it (tch's).
    fn lr(&self, group: usize) -> Option<f64>;

    /// Sets a group's learning rate.
    ///
    /// # Errors
    /// When there is no such group, or the rate is negative or not finite.
    fn set_lr(&mut self, group: usize, lr: f64) -> Result<(), OptimizerError>;

    /// What cyclic schedules lower while they raise the learning rate: SGD's `momentum`, or the first of Adam's
    /// `betas`. `None` where there is no such option, it is not in use (a momentum of 0), or the implementation cannot
    /// read it (tch's).
    ///
    /// # Source
    /// `OneCycleLR(cycle_momentum=True)`
    fn momentum(&self, _group: usize) -> Option<f64> {
        None
    }

    /// Sets what [`momentum`](Self::momentum) returns.
    ///
    /// # Errors
    /// When there is no such group, the value is outside [0, 1), or this optimizer has no momentum in use.
    fn set_momentum(&mut self, _group: usize, _momentum: f64) -> Result<(), OptimizerError> {
        Err(OptimizerError::NoMomentum)
    }

    /// Updates the parameters from their gradients; those without one stay as they are.
    ///
    /// # Errors
    /// When libtorch fails, for instance when memory for the first step's state runs out.
    ///
    /// # Syncs
    /// No, unless the implementation says so.
    fn step(&mut self) -> Result<(), OptimizerError>;

    /// The errors of [`step`](Self::step) that are known before any parameter changes, for those who step several
    /// optimizers as one.
    ///
    /// # Errors
    /// As `step`.
    ///
    /// # Syncs
    /// No.
    fn check_step(&self) -> Result<(), OptimizerError> {
        Ok(())
    }

    /// Makes the state that [`step`](Self::step) needs and that is not there yet, for the parameters that have a
    /// gradient: all of it, or an error and none. For those who want it made elsewhere, or before several optimizers
    /// step as one. By default nothing: state is made in the step.
    ///
    /// # Errors
    /// When memory runs out.
    ///
    /// # Syncs
    /// No.
    fn make_state(&mut self) -> Result<(), OptimizerError> {
        Ok(())
    }

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

    /// How its ranks agree on skipping a step, where its steps [wait for the other ranks](Behavior::communicates).
    /// `None`: they cannot, so that no step may be skipped.
    fn skip_agreement(&self) -> Option<&dyn SkipAgreement> {
        None
    }

    /// Replaces a step that is skipped, because of an infinite gradient for instance: undoes what should last only
    /// until the step, such as SAM's ascent.
    ///
    /// # Errors
    /// When libtorch fails.
    ///
    /// # Syncs
    /// No.
    fn step_skipped(&mut self) -> Result<(), OptimizerError> {
        Ok(())
    }

    /// How many sets of gradients it has freed or used up outside of a step (SAM's ascents). What was done to them,
    /// such as unscaling, must be done again to the next ones.
    fn gradients_used(&self) -> u64 {
        0
    }

    /// For each device, a float32 scalar that is 1 when gradients that were [used](Self::gradients_used) since the last
    /// step were infinite or NaN: a scaler skips the step then.
    fn used_found_inf(&self) -> Vec<Tensor> {
        Vec::new()
    }

    /// Frees the gradients.
    ///
    /// # Errors
    /// When libtorch fails.
    ///
    /// # Source
    /// `zero_grad(set_to_none=True)`
    fn zero_grad(&mut self) -> Result<(), OptimizerError>;

    /// Refreshes the copies of the parameters' values that this optimizer keeps, such as float32 masters. Call it after
    /// anything but this optimizer's steps has written to the parameters.
    ///
    /// # Errors
    /// When libtorch fails.
    ///
    /// # Syncs
    /// No.
    fn params_changed(&mut self) -> Result<(), OptimizerError> {
        Ok(())
    }

    /// Its state, so that a `Box<dyn Optimizer>` can be saved; `None` where that is impossible (tch's).
    fn as_stateful(&self) -> Option<&dyn Stateful> {
        None
    }

    /// The same, to load it.
    fn as_stateful_mut(&mut self) -> Option<&mut dyn Stateful> {
        None
    }
}

impl OptimizerError {
    /// [`OptimizerError::InvalidParameter`] for the parameter at `index`.
    pub fn parameter(parameter: &Parameter, index: usize, reason: impl Into<String>) -> Self {
        Self::InvalidParameter { parameter: parameter.label(index), reason: reason.into() }
    }

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
