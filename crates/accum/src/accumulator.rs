//! Backward passes over micro-batches that add up to the large batch's gradient.

use overdrive_core::{
    Activity, Entry, GradientSync, Optimizer, OptimizerError, SingleProcess, StateDict, StateError, Stateful,
    SyncError, TorchError, activity,
};
use overdrive_ffi::{Arg, LazyOp, TensorList};
use tch::Tensor;

use crate::count::{Count, Unit};
use crate::windows::Windows;

static FOREACH_MUL: LazyOp = LazyOp::new("aten::_foreach_mul_", "Scalar");
static MUL: LazyOp = LazyOp::new("aten::mul", "Scalar");

/// Why accumulation refused or failed. The gradients of an open window are worth nothing then: zero them and call
/// [`Accumulator::abandon`].
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AccumError {
    /// A window of no micro-batches.
    #[error("a window has {found} micro-batches, but should have at least 1")]
    Steps {
        /// What was given.
        found: usize,
    },
    /// A micro-batch of less than no samples.
    #[error("a micro-batch counts {found} samples or tokens, but should count at least 0")]
    Count {
        /// What was given.
        found: i64,
    },
    /// Samples in one micro-batch, tokens in another.
    #[error(
        "this micro-batch counts {found}, but those before counted {expected}: the loss has to be the mean over one"
    )]
    Unit {
        /// What was counted before.
        expected: &'static str,
        /// What is counted now.
        found: &'static str,
    },
    /// A loss that holds nothing.
    #[error("the loss is an undefined tensor, but should be the mean over the micro-batch: one number")]
    UndefinedLoss,
    /// A loss that is not one number.
    #[error("the loss has shape {shape:?}, but should be the mean over the micro-batch: one number")]
    LossShape {
        /// The loss's shape.
        shape: Vec<i64>,
    },
    /// An optimizer that cannot be accumulated for.
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),
    /// Ranks could not agree.
    #[error(transparent)]
    Sync(#[from] SyncError),
    /// libtorch failed.
    #[error(transparent)]
    Torch(#[from] TorchError),
}

impl From<tch::TchError> for AccumError {
    fn from(error: tch::TchError) -> Self {
        Self::Torch(error.into())
    }
}

/// Accumulates the gradients of several micro-batches into that of one large batch.
///
/// With `n_i` samples and mean loss `L_i`, a window's gradient is that of `sum(n_i * L_i) / sum(n_i)`, the sums over all
/// ranks. Each backward pass runs on `L_i * n_i / reference`, where the reference is the largest window's total so far
/// (for the first: what a full window of the first micro-batch's kind would hold), so that float16 activations' gradients
/// stay in the range of the large batch's; when the window closes, the gradients are multiplied by `reference / total`,
/// once, and not at all where that is 1. Clip and step behind that.
///
/// # Source
/// The large batch itself. PyTorch has no counterpart; its recipes divide by a fixed count.
#[derive(Debug)]
pub struct Accumulator<S: GradientSync = SingleProcess> {
    steps: usize,
    sync: S,
    /// What counts are divided by, the same on all ranks; none until a rank has counted something.
    reference: Option<f64>,
    /// What is counted.
    unit: Option<Unit>,
    /// What this rank's open window has counted so far; none when no window is open.
    window_count: Option<i64>,
}

impl Accumulator {
    /// Accumulates over windows of `steps` micro-batches, in one process.
    ///
    /// # Errors
    /// When `steps` is 0.
    pub fn new(steps: usize) -> Result<Self, AccumError> {
        if steps == 0 {
            return Err(AccumError::Steps { found: steps });
        }
        Ok(Self { steps, sync: SingleProcess, reference: None, unit: None, window_count: None })
    }
}

impl<S: GradientSync> Accumulator<S> {
    /// The same over ranks, whose gradients `sync` averages: it is held back until a window's last backward pass.
    pub fn with_sync<T: GradientSync>(self, sync: T) -> Accumulator<T> {
        Accumulator { steps: self.steps, sync, reference: None, unit: None, window_count: None }
    }

    /// The batches, each with whether it closes its window. Looks one batch ahead.
    pub fn windows<I: IntoIterator>(&self, batches: I) -> Windows<I::IntoIter> {
        Windows::new(batches.into_iter(), self.steps)
    }

    /// Runs backward on a micro-batch's mean loss, weighted by the samples or tokens that it is over.
    ///
    /// `closes` says that the window ends here; the gradients of the parameters that `opt` has by then, those of groups
    /// that were added meanwhile among them, are those of the large batch. Give the loss as `GradScaler::scale` returns it
    /// when there is a scaler. A micro-batch that counts nothing (every token masked, and so a loss of NaN) adds nothing.
    ///
    /// Returns the window's total over all ranks when it closes. After a total of 0 there is nothing to step with.
    ///
    /// # Shapes
    /// `loss`: one number.
    ///
    /// # Errors
    /// When the count is negative or of another unit than before, the loss is not one number, the optimizer steps during
    /// the backward pass, or backward or the ranks fail.
    ///
    /// # Panics
    /// Goes on with a panic of DDP's communication hook.
    ///
    /// # Syncs
    /// Not with the device. Over ranks, waits for all of them when a window closes, and in the first window at each
    /// micro-batch until one counts anything.
    pub fn backward<O: Optimizer + ?Sized>(
        &mut self,
        opt: &O,
        loss: &Tensor,
        count: Count,
        closes: bool,
    ) -> Result<Option<f64>, AccumError> {
        let _backward = activity(|| Activity::Backward);
        if opt.behavior().steps_in_backward {
            let reason = "it steps at each backward pass, before the window closes; build it with `build`";
            return Err(OptimizerError::DoesNotFit { part: "Accumulator", reason }.into());
        }
        let (unit, count) = count.parts();
        if count < 0 {
            return Err(AccumError::Count { found: count });
        }
        if let Some(expected) = self.unit.filter(|expected| *expected != unit) {
            return Err(AccumError::Unit { expected: expected.name(), found: unit.name() });
        }
        if !loss.defined() {
            return Err(AccumError::UndefinedLoss);
        }
        if loss.numel() != 1 {
            return Err(AccumError::LossShape { shape: loss.size() });
        }
        self.unit = Some(unit);
        let reference = self.reference(count)?;
        if self.window_count.is_none() || closes {
            self.sync.hold_back(!closes)?;
        }
        // Open from here on, so that `abandon` resumes synchronisation even if this very backward fails.
        let counted = self.window_count.unwrap_or(0).saturating_add(count);
        self.window_count = Some(counted);
        if count > 0 {
            self.sync.backward(&weighted(loss, count as f64 / reference)?).map_err(of_backward)?;
        } else if closes {
            // The other ranks wait for this one's gradients, even when they are all zero. Not by way of the loss: its mean
            // over no samples has NaN for a gradient.
            self.sync.close_with_nothing()?;
        }
        if closes { self.close(opt, counted, reference).map(Some) } else { Ok(None) }
    }

    /// Forgets an open window, after an error say. The gradients are the caller's to zero.
    ///
    /// # Errors
    /// When synchronisation cannot be resumed.
    pub fn abandon(&mut self) -> Result<(), AccumError> {
        if self.window_count.take().is_some() {
            self.sync.hold_back(false)?;
        }
        Ok(())
    }

    /// For the first window, agreed on by all ranks: a full window's count if all micro-batches were like the first that
    /// counts anything, averaged over ranks.
    fn reference(&mut self, count: i64) -> Result<f64, AccumError> {
        if let Some(reference) = self.reference {
            return Ok(reference);
        }
        let over_ranks = self.sync.sum(count as f64 * self.steps as f64)?;
        if over_ranks > 0.0 {
            self.reference = Some(over_ranks / self.sync.world_size() as f64);
        }
        // Without any count nothing is divided by it.
        Ok(self.reference.unwrap_or(1.0))
    }

    fn close<O: Optimizer + ?Sized>(&mut self, opt: &O, counted: i64, reference: f64) -> Result<f64, AccumError> {
        self.window_count = None;
        let total = self.sync.sum(counted as f64)?;
        // Backward averages over ranks where the large batch sums.
        let ranks = self.sync.world_size() as f64;
        // A short window at the end of an epoch must not make the next full one's gradients larger than they ever were.
        self.reference = self.reference.map(|reference| reference.max(total / ranks));
        let factor = ranks * reference / total;
        if total > 0.0 && factor != 1.0 {
            let grads = TensorList::new(&opt.params())?.grads()?;
            if !grads.list.is_empty() {
                let _no_grad = tch::no_grad_guard();
                FOREACH_MUL.call(&[Arg::TensorList(&grads.list), Arg::Double(factor)])?;
            }
        }
        Ok(total)
    }
}

/// The entry `reference`, where a window has been closed: with it a resumed run rounds as an unbroken one. Save between
/// windows; within one there is nothing to save ([`StateError::NotSaved`]), because its gradients would be lost.
impl<S: GradientSync> Stateful for Accumulator<S> {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        if self.window_count.is_some() {
            let reason = "a window is open, whose gradients would be lost: save when it has closed";
            return Err(StateError::NotSaved { reason });
        }
        let mut state = StateDict::new();
        if let Some(reference) = self.reference {
            state.insert("reference", Entry::Float(reference));
        }
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let reference = match state.get("reference") {
            Ok(_) => Some(state.float("reference")?),
            Err(_) => None,
        };
        if let Some(found) = reference.filter(|found| !(*found > 0.0 && found.is_finite())) {
            let (key, expected) = ("reference".to_owned(), "a count, finite and above 0".to_owned());
            return Err(StateError::Mismatch { key, expected, found: found.to_string() });
        }
        state.refuse_unknown(&["reference"])?;
        self.reference = reference;
        Ok(())
    }
}

/// Backward's own failures are not between ranks.
fn of_backward(error: SyncError) -> AccumError {
    match error.0.downcast::<TorchError>() {
        Ok(own) => AccumError::Torch(*own),
        Err(between) => AccumError::Sync(SyncError(between)),
    }
}

fn weighted(loss: &Tensor, weight: f64) -> Result<Tensor, AccumError> {
    if weight == 1.0 { Ok(loss.shallow_clone()) } else { Ok(MUL.tensor(&[Arg::Tensor(loss), Arg::Double(weight)])?) }
}
