//! Facts about parameters that one crate records and others must know ("a reducer averages this gradient"), looked up
//! by tensor.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use overdrive_ffi::TensorId;
use tch::Tensor;

use crate::optimizer::{Optimizer, OptimizerError};

/// Parameters that an optimizer [has moved](crate::Behavior::moves_parameters): averages and saved states of the model
/// must not use their values as trained weights.
pub static MOVED: Marks = Marks::new();

/// Parameters whose gradients a `DistributedDataParallel` averages in the backward pass.
pub static AVERAGED: Marks = Marks::new();

/// Parameters that are [stepped in backward](crate::Behavior::steps_in_backward): their gradients are used up there.
pub static STEPPED_IN_BACKWARD: Marks = Marks::new();

/// Parameters whose gradients a `GradScaler` has unscaled but not yet stepped with: another backward pass would add
/// scaled gradients to them.
pub static UNSCALED: Marks = Marks::new();

/// Parameters that a `DistributedDataParallel` was told to ignore: each rank trains its own, or the program averages
/// them.
pub static IGNORED: Marks = Marks::new();

/// Parameters whose averaged gradient only one rank keeps (ZeRO-2): a norm of this rank's gradients is not that of all.
pub static SHARDED_GRADIENTS: Marks = Marks::new();

/// Whole parameters whose values are sharded over ranks (ZeRO-3): they are there while their unit computes alone.
pub static SHARDED: Marks = Marks::new();

/// Why a part that uses whole parameters refuses one that is [`SHARDED`].
pub const IS_SHARDED: &str = "its values and gradient are sharded over the ranks: make the optimizer by `optimizer` of the \
                              `FullyShardedDataParallel`, which averages gradients itself";

/// Why a step is refused where a parameter is neither [`AVERAGED`] nor [`IGNORED`], and others are averaged.
pub const NOT_AVERAGED: &str = "its gradient is not averaged over the ranks, but other parameters' gradients are: make the \
                                `DistributedDataParallel` anew after adding or unfreezing layers, or `ignore` parameters \
                                that each rank trains for itself";

/// The tensors for which one fact holds.
#[derive(Debug)]
pub struct Marks(OnceLock<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    tensors: HashMap<TensorId, Mark>,
    /// How many marks were ever made.
    made: u64,
}

/// How often a tensor is marked, and which mark was the last.
#[derive(Clone, Copy, Debug)]
struct Mark {
    times: usize,
    last: u64,
}

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

    fn lock(&self) -> MutexGuard<'_, Table> {
        self.0.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Marks these tensors until the returned value is dropped; a tensor may be marked several times.
    #[must_use = "dropping it removes the marks"]
    pub fn mark(&'static self, tensors: Vec<Tensor>) -> Marked {
        let mut marks = self.lock();
        marks.made += 1;
        let last = marks.made;
        for tensor in &tensors {
            let mark = marks.tensors.entry(TensorId::of(tensor)).or_insert(Mark { times: 0, last });
            *mark = Mark { times: mark.times + 1, last };
        }
        Marked { tensors, marks: self }
    }

    /// How many marks were ever made.
    pub fn made(&self) -> u64 {
        self.lock().made
    }

    /// Whether nothing is marked.
    pub fn is_empty(&self) -> bool {
        self.lock().tensors.is_empty()
    }

    /// The first of these tensors that is marked.
    pub fn position<'a>(&self, tensors: impl IntoIterator<Item = &'a Tensor>) -> Option<usize> {
        self.position_since(tensors, 0)
    }

    /// The first of these tensors that is marked, and was last marked after the first [`made`](Self::made) marks.
    pub fn position_since<'a>(&self, tensors: impl IntoIterator<Item = &'a Tensor>, made: u64) -> Option<usize> {
        let marks = self.lock();
        if marks.tensors.is_empty() {
            return None;
        }
        let is_marked = |tensor| marks.tensors.get(&TensorId::of(tensor)).is_some_and(|mark| mark.last > made);
        tensors.into_iter().position(is_marked)
    }

    /// How often this tensor is marked.
    pub fn times(&self, tensor: &Tensor) -> usize {
        self.lock().tensors.get(&TensorId::of(tensor)).map_or(0, |mark| mark.times)
    }

    /// Whether this tensor is marked.
    pub fn contains(&self, tensor: &Tensor) -> bool {
        self.times(tensor) > 0
    }
}

/// For optimizers, before a step: an error when a parameter's gradient is not averaged over the ranks while others are
/// [`AVERAGED`]. It was made or unfrozen after the `DistributedDataParallel`, and its values would differ between
/// ranks. An error too when a parameter is [`SHARDED`].
///
/// # Errors
/// [`OptimizerError::InvalidParameter`]
pub fn check_averaged(opt: &(impl Optimizer + ?Sized)) -> Result<(), OptimizerError> {
    if AVERAGED.is_empty() {
        return Ok(());
    }
    let params = opt.params();
    refuse(opt, SHARDED.position(&params), IS_SHARDED)?;
    if AVERAGED.position(&params).is_none() {
        return Ok(());
    }
    let is_alone = |param: &Tensor| !AVERAGED.contains(param) && !IGNORED.contains(param) && param.grad().defined();
    refuse(opt, params.iter().position(is_alone), NOT_AVERAGED)
}

/// For optimizers that are not made by `build_in_backward`, before a step: an error when another optimizer has used the
/// gradients up, so that nothing would train.
///
/// # Errors
/// [`OptimizerError::InvalidParameter`]
pub fn check_not_stepped_in_backward(opt: &(impl Optimizer + ?Sized)) -> Result<(), OptimizerError> {
    if STEPPED_IN_BACKWARD.is_empty() {
        return Ok(());
    }
    let reason = "another optimizer, made by `build_in_backward`, steps it during the backward pass and frees its gradient: \
                  a parameter belongs to one optimizer";
    refuse(opt, STEPPED_IN_BACKWARD.position(&opt.params()), reason)
}

fn refuse(opt: &(impl Optimizer + ?Sized), found: Option<usize>, reason: &str) -> Result<(), OptimizerError> {
    found.map_or(Ok(()), |index| Err(OptimizerError::parameter(&opt.parameters()[index], index, reason)))
}

impl Drop for Marked {
    fn drop(&mut self) {
        let mut marks = self.marks.lock();
        for id in self.tensors.iter().map(TensorId::of) {
            match marks.tensors.get_mut(&id) {
                Some(mark) if mark.times > 1 => mark.times -= 1,
                _ => drop(marks.tensors.remove(&id)),
            }
        }
    }
}
