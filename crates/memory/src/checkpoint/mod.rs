//! Activation checkpointing: what a part of the forward pass saves is computed again in the backward pass.

mod budget;
mod checksum;
mod context;
mod frame;
mod knapsack;
mod policy;
mod recompute;
mod sequential;

use std::any::TypeId;
use std::panic::Location;
use std::sync::Arc;

use overdrive_ffi::autograd::BoxError;
use overdrive_ffi::context::grad_enabled;
use overdrive_ffi::keep::Keeper;
use overdrive_ffi::saved_tensors::HooksGuard;
use tch::Tensor;

use crate::error::MemoryError;
pub use budget::Budget;
use context::Context;
pub(crate) use context::Generators;
use frame::{FirstRun, Forward, Frame};
pub use policy::{Keeps, Policy};
pub use sequential::checkpoint_sequential;

/// Runs a function without keeping the tensors that its backward pass needs. When the backward pass reaches the function,
/// it runs again, and what it saves then is kept until the gradients are computed.
///
/// The function owns what it uses: parameters as `shallow_clone`s or in an `Arc`ed module. It has to compute the same
/// when it runs again; autocast and the random numbers of the CPU and of the inputs' devices are set as they were, and no
/// other thread may draw such numbers meanwhile. What it does besides that, such as counting, happens twice; it is not
/// run to its end the second time. It may call `checkpoint` itself and, for tensors of the CPU, run backward passes.
///
/// `inputs` are the tensors that gradients flow to; others may be captured. None may be changed in place before the
/// backward pass, as for any operator.
///
/// Where gradients are off, it just runs.
///
/// # Errors
/// When the function fails. The backward pass fails when the function fails or panics there, or saves other tensors than
/// the first time; the error names the line that called this.
///
/// # Source
/// `torch.utils.checkpoint.checkpoint(use_reentrant=False)`
#[track_caller]
pub fn checkpoint<const N: usize, T, E: Into<BoxError>>(
    function: impl Fn(&[Tensor; N]) -> Result<T, E> + Send + 'static,
    inputs: [&Tensor; N],
) -> Result<T, MemoryError> {
    ActivationCheckpoint::default().run(function, inputs)
}

/// What is compared when a function runs again.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeterminismCheck {
    /// Shapes, dtypes and devices of what is saved, how often it was changed in place, and whether a leaf that requires a
    /// gradient, and from which a saved tensor was computed, was changed since the first run. Not values.
    #[default]
    Default,
    /// That, and the values of what is saved, to the bit: also a number that was drawn from another generator, or a captured
    /// tensor that was changed, is noticed. Each run reads all that is saved once more, and waits for the device. Operators
    /// that add in no fixed order, on a GPU, do not pass.
    Values,
    /// Whether as many tensors are saved; with an early stop, whether not fewer are.
    None,
}

/// [`checkpoint`](checkpoint()) with options.
#[derive(Clone, Debug)]
#[must_use = "options do nothing until `run`"]
pub struct ActivationCheckpoint {
    name: Option<String>,
    preserve_rng_state: bool,
    determinism_check: DeterminismCheck,
    early_stop: bool,
    policy: Policy,
}

impl Default for ActivationCheckpoint {
    fn default() -> Self {
        let determinism_check = DeterminismCheck::Default;
        Self { name: None, preserve_rng_state: true, determinism_check, early_stop: true, policy: Policy::default() }
    }
}

impl ActivationCheckpoint {
    /// The name in errors; default the line that calls [`run`](Self::run).
    pub fn name(mut self, name: impl Into<String>) -> Self {
        self.name = Some(name.into());
        self
    }

    /// Whether the function draws the same random numbers when it runs again; default true. The generators are those of
    /// the CPU, and of the devices of the inputs and of the tensors that the function saves. PyTorch's are the inputs' alone.
    pub fn preserve_rng_state(mut self, preserve: bool) -> Self {
        self.preserve_rng_state = preserve;
        self
    }

    /// What is compared when the function runs again.
    pub fn determinism_check(mut self, check: DeterminismCheck) -> Self {
        self.determinism_check = check;
        self
    }

    /// Whether the second run ends with the last tensor that is needed; default true. The operator that saves it then
    /// fails, and the function ends with its error or its panic.
    ///
    /// # Source
    /// `torch.utils.checkpoint.set_checkpoint_early_stop`
    pub fn early_stop(mut self, early_stop: bool) -> Self {
        self.early_stop = early_stop;
        self
    }

    /// Which operators' results are kept, and not computed again; default none.
    ///
    /// # Source
    /// `torch.utils.checkpoint.create_selective_checkpoint_contexts`
    #[doc(alias = "create_selective_checkpoint_contexts")]
    pub fn keep(mut self, policy: Policy) -> Self {
        self.policy = policy;
        self
    }

    /// Runs a function; see [`checkpoint`](checkpoint()).
    ///
    /// # Errors
    /// As [`checkpoint`](checkpoint()).
    #[track_caller]
    pub fn run<const N: usize, T, E: Into<BoxError>>(
        self,
        function: impl Fn(&[Tensor; N]) -> Result<T, E> + Send + 'static,
        inputs: [&Tensor; N],
    ) -> Result<T, MemoryError> {
        let caller = Location::caller();
        let scope = || self.name.clone().unwrap_or_else(|| format!("checkpoint at {caller}"));
        let failed = |error: E| MemoryError::Function { scope: scope(), source: error.into() };
        let own = inputs.map(Tensor::shallow_clone);
        if !grad_enabled() {
            return function(&own).map_err(failed);
        }
        let context = Context::now(&own, self.preserve_rng_state)?;
        let function_type = type_of(&function);
        let function = Arc::new(parking_lot::ReentrantMutex::new(function));
        let again = {
            let function = Arc::clone(&function);
            move |inputs: Vec<Tensor>| {
                let inputs: [Tensor; N] = inputs.try_into().map_err(|_| "inputs are missing")?;
                function.lock()(&inputs).map(drop).map_err(Into::into)
            }
        };
        let frame = Arc::new(Frame::new(scope(), &self, context, &own, function_type, again)?);
        let result = {
            let _run = FirstRun(&frame);
            let _hooks = HooksGuard::new(Arc::new(Forward(Arc::clone(&frame))))?;
            let _kept = frame.keeper.as_ref().map(Keeper::keep).transpose()?;
            function.lock()(&own).map_err(failed)
        };
        frame.forward_is_done(result.is_ok());
        result
    }
}

fn type_of<F: 'static>(_function: &F) -> TypeId {
    TypeId::of::<F>()
}
