//! What holds of parameters at the moment, for whoever has nothing but the tensors.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use overdrive_ffi::TensorId;
use tch::Tensor;

use crate::optimizer::{Optimizer, OptimizerError};

/// Parameters that an optimizer [has moved](crate::Behavior::moves_parameters): averages and states of the model must not
/// take them for trained weights.
pub static MOVED: Marks = Marks::new();

/// Parameters whose gradients a `DistributedDataParallel` averages in the backward pass.
pub static AVERAGED: Marks = Marks::new();

/// Parameters that are [stepped in backward](crate::Behavior::steps_in_backward): their gradients are used up there.
pub static STEPPED_IN_BACKWARD: Marks = Marks::new();

/// Parameters whose gradients a `GradScaler` has unscaled and not stepped with: another backward pass would add scaled ones
/// to them.
pub static UNSCALED: Marks = Marks::new();

/// The tensors of which something holds.
#[derive(Debug)]
pub struct Marks(OnceLock<Mutex<HashMap<TensorId, usize>>>);

/// While it lives, its tensors are marked.
#[derive(Debug)]
pub struct Marked {
    tensors: Vec<Tensor>,
    marks: &'static Marks,
}

impl Marks {
    const fn new() -> Self {
        Self(OnceLock::new())
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<TensorId, usize>> {
        self.0.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks these tensors until what is returned is dropped; a tensor may be marked several times.
    #[must_use = "the marks go with it"]
    pub fn mark(&'static self, tensors: Vec<Tensor>) -> Marked {
        let mut marks = self.lock();
        for tensor in &tensors {
            *marks.entry(TensorId::of(tensor)).or_default() += 1;
        }
        Marked { tensors, marks: self }
    }

    /// Whether nothing is marked.
    pub fn is_empty(&self) -> bool {
        self.lock().is_empty()
    }

    /// The first of these tensors that is marked.
    pub fn position<'a>(&self, tensors: impl IntoIterator<Item = &'a Tensor>) -> Option<usize> {
        let marks = self.lock();
        if marks.is_empty() {
            return None;
        }
        tensors.into_iter().position(|tensor| marks.contains_key(&TensorId::of(tensor)))
    }

    /// Whether this tensor is marked.
    pub fn contains(&self, tensor: &Tensor) -> bool {
        self.lock().contains_key(&TensorId::of(tensor))
    }
}

/// For optimizers, before a step: an error when a parameter has a gradient that is this rank's own while others are
/// [`AVERAGED`]. It was made or unfrozen behind the `DistributedDataParallel`, and each rank would train its own.
///
/// # Errors
/// [`OptimizerError::InvalidParameter`]
pub fn check_averaged(opt: &(impl Optimizer + ?Sized)) -> Result<(), OptimizerError> {
    if AVERAGED.is_empty() {
        return Ok(());
    }
    let params = opt.params();
    if AVERAGED.position(&params).is_none() {
        return Ok(());
    }
    match params.iter().position(|param| !AVERAGED.contains(param) && param.grad().defined()) {
        None => Ok(()),
        Some(index) => {
            let reason = "its gradient is not averaged over the ranks, and those of others are: make the \
                          `DistributedDataParallel` anew behind new or unfrozen layers, or give what each rank trains for \
                          itself an optimizer of its own";
            Err(OptimizerError::parameter(&opt.parameters()[index], index, reason))
        }
    }
}

impl Drop for Marked {
    fn drop(&mut self) {
        let mut marks = self.marks.lock();
        for id in self.tensors.iter().map(TensorId::of) {
            match marks.get_mut(&id) {
                Some(times) if *times > 1 => *times -= 1,
                _ => drop(marks.remove(&id)),
            }
        }
    }
}
