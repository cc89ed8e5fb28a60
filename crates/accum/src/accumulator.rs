//! Backward passes over micro-batches that add up to the large batch's gradient.

use std::borrow::Borrow;

use overdrive_core::{Activity, GradientSync, SingleProcess, SyncError, TorchError, activity};
use overdrive_ffi::{Arg, LazyOp, TensorList};
use tch::Tensor;

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
    /// A loss that holds nothing.
    #[error("the loss is an undefined tensor, but should be the mean over the micro-batch: one number")]
    UndefinedLoss,
    /// A loss that is not one number.
    #[error("the loss has shape {shape:?}, but should be the mean over the micro-batch: one number")]
    LossShape {
        /// The loss's shape.
        shape: Vec<i64>,
    },
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
/// ranks. Each backward pass runs on `L_i * n_i / reference`, where the reference is the last window's total (for the
/// first: what a full window of the first micro-batch's kind would hold), so that float16 activations' gradients stay in
/// the range of the large batch's; when the window closes, the gradients are multiplied by `reference / total`, once, and
/// not at all where that is 1. Clip and step behind that.
///
/// # Source
/// The large batch itself. PyTorch has no counterpart; its recipes divide by a fixed count.
#[derive(Debug)]
pub struct Accumulator<S: GradientSync = SingleProcess> {
    params: TensorList,
    steps: usize,
    sync: S,
    /// What counts are divided by, the same on all ranks; none until a rank has counted something.
    reference: Option<f64>,
    /// What this rank's open window has counted so far; none when no window is open.
    window_count: Option<i64>,
}

impl Accumulator {
    /// Accumulates over windows of `steps` micro-batches into the gradients of `params`, in one process.
    ///
    /// # Errors
    /// When `steps` is 0.
    pub fn new<T: Borrow<Tensor>>(params: &[T], steps: usize) -> Result<Self, AccumError> {
        if steps == 0 {
            return Err(AccumError::Steps { found: steps });
        }
        let params = TensorList::new(params)?;
        Ok(Self { params, steps, sync: SingleProcess, reference: None, window_count: None })
    }
}

impl<S: GradientSync> Accumulator<S> {
    /// The same over ranks, whose gradients `sync` averages: it is held back until a window's last backward pass.
    pub fn with_sync<T: GradientSync>(self, sync: T) -> Accumulator<T> {
        Accumulator { params: self.params, steps: self.steps, sync, reference: None, window_count: None }
    }

    /// The batches, each with whether it closes its window. Looks one batch ahead.
    pub fn windows<I: IntoIterator>(&self, batches: I) -> Windows<I::IntoIter> {
        Windows::new(batches.into_iter(), self.steps)
    }

    /// Runs backward on a micro-batch's mean loss, weighted by the samples (or tokens) that `count` says it is over.
    ///
    /// `closes` says that the window ends here; the gradients are then those of the large batch. Give the loss as
    /// `GradScaler::scale` returns it when there is a scaler. A micro-batch that counts nothing (every token masked, and
    /// so a loss of NaN) adds nothing.
    ///
    /// Returns the window's total over all ranks when it closes. After a total of 0 there is nothing to step with.
    ///
    /// # Shapes
    /// `loss`: one number.
    ///
    /// # Errors
    /// When the count is negative, the loss is not one number, or backward or the ranks fail.
    ///
    /// # Panics
    /// Goes on with a panic of DDP's communication hook.
    ///
    /// # Syncs
    /// Not with the device. Over ranks, waits for all of them when a window closes, and in the first window at each
    /// micro-batch until one counts anything.
    pub fn backward(&mut self, loss: &Tensor, count: i64, closes: bool) -> Result<Option<f64>, AccumError> {
        let _backward = activity(|| Activity::Backward);
        if count < 0 {
            return Err(AccumError::Count { found: count });
        }
        if !loss.defined() {
            return Err(AccumError::UndefinedLoss);
        }
        if loss.numel() != 1 {
            return Err(AccumError::LossShape { shape: loss.size() });
        }
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
        if closes { self.close(counted, reference).map(Some) } else { Ok(None) }
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

    fn close(&mut self, counted: i64, reference: f64) -> Result<f64, AccumError> {
        self.window_count = None;
        let total = self.sync.sum(counted as f64)?;
        // Backward averages over ranks where the large batch sums.
        let ranks = self.sync.world_size() as f64;
        let factor = ranks * reference / total;
        if total > 0.0 {
            self.reference = Some(total / ranks);
        }
        if total > 0.0 && factor != 1.0 {
            let grads = self.params.grads()?;
            if !grads.list.is_empty() {
                let _no_grad = tch::no_grad_guard();
                FOREACH_MUL.call(&[Arg::TensorList(&grads.list), Arg::Double(factor)])?;
            }
        }
        Ok(total)
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
