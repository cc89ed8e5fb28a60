//! What gradient accumulation needs from data-parallel training.

use std::rc::Rc;
use std::sync::Arc;

use tch::Tensor;

use crate::TorchError;

/// Why a synchronisation between ranks failed.
#[derive(Debug, thiserror::Error)]
#[error("synchronisation between ranks failed: {0}")]
pub struct SyncError(#[from] pub Box<dyn std::error::Error + Send + Sync>);

/// Who averages the gradients over ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AveragedBy {
    /// Nobody: there is one rank.
    Nobody,
    /// The backward pass, unless it is held back (`DistributedDataParallel`).
    Backward,
    /// The optimizer, in its step ([`Behavior::communicates`](crate::Behavior::communicates)).
    Optimizer,
}

/// Averages gradients over ranks, and can hold that back until an accumulation window closes.
///
/// # Source
/// `DistributedDataParallel.no_sync`
pub trait GradientSync {
    /// How many ranks average their gradients.
    fn world_size(&self) -> usize;

    /// Who averages them.
    fn averaged_by(&self) -> AveragedBy;

    /// Whether this parameter's gradient is averaged over the ranks. True by default.
    fn averages(&self, _parameter: &Tensor) -> bool {
        true
    }

    /// Whether ranks wait for each other in each forward pass and in each held-back backward pass too, so that all ranks have
    /// to make equally many (`FullyShardedDataParallel`). False by default.
    fn counts_passes(&self) -> bool {
        false
    }

    /// Sets whether the next backward passes on this thread leave the gradients local.
    ///
    /// # Errors
    /// When a backward pass is under way.
    fn hold_back(&self, hold: bool) -> Result<(), SyncError>;

    /// Runs backward from a loss. The default calls `Tensor::backward`; implementations may report more about failures
    /// between ranks.
    ///
    /// # Errors
    /// When a rank is gone, or the timeout has passed; a [`TorchError`] when backward itself fails.
    ///
    /// # Syncs
    /// Waits for every rank, unless gradients are held back.
    fn backward(&self, loss: &Tensor) -> Result<(), SyncError> {
        loss.f_backward().map_err(|error| SyncError(Box::new(TorchError::from(error))))
    }

    /// Replaces the backward pass that closes a window, on a rank whose last micro-batch adds nothing: averages what
    /// this rank has accumulated, while the other ranks run their backward pass.
    ///
    /// # Errors
    /// When a rank is gone, or the timeout has passed.
    ///
    /// # Syncs
    /// Waits for every rank.
    fn close_with_nothing(&self) -> Result<(), SyncError>;

    /// The sum of a number over all ranks; each rank must call it equally often.
    ///
    /// # Errors
    /// When a rank is gone, or the timeout has passed.
    ///
    /// # Syncs
    /// Waits for every rank.
    fn sum(&self, value: f64) -> Result<f64, SyncError>;

    /// Begins a sum, and returns a value that waits for it, so that a backward pass can run meanwhile. Each rank must
    /// begin its sums and other collectives in the same order. By default the whole sum is made here.
    ///
    /// # Errors
    /// As [`sum`](Self::sum), here or in the wait.
    fn start_sum(&self, value: f64) -> Result<PendingSum, SyncError> {
        let sum = self.sum(value)?;
        Ok(Box::new(move || Ok(sum)))
    }
}

/// Waits for a sum over ranks.
pub type PendingSum = Box<dyn FnOnce() -> Result<f64, SyncError>>;

/// A single process, with no other ranks.
#[derive(Clone, Copy, Debug, Default)]
pub struct SingleProcess;

impl GradientSync for SingleProcess {
    fn world_size(&self) -> usize {
        1
    }

    fn averaged_by(&self) -> AveragedBy {
        AveragedBy::Nobody
    }

    fn hold_back(&self, _hold: bool) -> Result<(), SyncError> {
        Ok(())
    }

    fn close_with_nothing(&self) -> Result<(), SyncError> {
        Ok(())
    }

    fn sum(&self, value: f64) -> Result<f64, SyncError> {
        Ok(value)
    }
}

macro_rules! pass_on {
    ($($pointer:ty),+) => {$(
        impl<S: GradientSync + ?Sized> GradientSync for $pointer {
            fn world_size(&self) -> usize {
                (**self).world_size()
            }

            fn averaged_by(&self) -> AveragedBy {
                (**self).averaged_by()
            }

            fn averages(&self, parameter: &Tensor) -> bool {
                (**self).averages(parameter)
            }

            fn counts_passes(&self) -> bool {
                (**self).counts_passes()
            }

            fn hold_back(&self, hold: bool) -> Result<(), SyncError> {
                (**self).hold_back(hold)
            }

            fn backward(&self, loss: &Tensor) -> Result<(), SyncError> {
                (**self).backward(loss)
            }

            fn close_with_nothing(&self) -> Result<(), SyncError> {
                (**self).close_with_nothing()
            }

            fn sum(&self, value: f64) -> Result<f64, SyncError> {
                (**self).sum(value)
            }

            fn start_sum(&self, value: f64) -> Result<PendingSum, SyncError> {
                (**self).start_sum(value)
            }
        }
    )+};
}

pass_on!(&S, Box<S>, Rc<S>, Arc<S>);
