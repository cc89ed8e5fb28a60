//! What gradient accumulation asks of data-parallel training.

use std::rc::Rc;
use std::sync::Arc;

use tch::Tensor;

use crate::TorchError;

/// Why a synchronisation between ranks failed.
#[derive(Debug, thiserror::Error)]
#[error("between ranks: {0}")]
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

/// Gradients that are averaged over ranks, and can be held back until a window closes.
///
/// # Source
/// `DistributedDataParallel.no_sync`
pub trait GradientSync {
    /// How many ranks average their gradients.
    fn world_size(&self) -> usize;

    /// Who averages them.
    fn averaged_by(&self) -> AveragedBy;

    /// Whether this parameter's gradient is averaged with the others; true when not said.
    fn averages(&self, _parameter: &Tensor) -> bool {
        true
    }

    /// Whether the backward passes that follow on this thread leave the gradients local.
    ///
    /// # Errors
    /// When a backward pass is under way.
    fn hold_back(&self, hold: bool) -> Result<(), SyncError>;

    /// Runs backward from a loss: `Tensor::backward`, unless whoever synchronises can say more of what fails between ranks.
    ///
    /// # Errors
    /// When a rank is gone, or the timeout has passed; a [`TorchError`] is backward's own.
    ///
    /// # Syncs
    /// Waits for every rank, unless gradients are held back.
    fn backward(&self, loss: &Tensor) -> Result<(), SyncError> {
        loss.f_backward().map_err(|error| SyncError(Box::new(TorchError::from(error))))
    }

    /// In place of the backward pass that closes a window, on a rank where it has nothing to add: what has added up on this
    /// rank is averaged, while the others run theirs.
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
}

/// One process that synchronises with nobody.
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
        }
    )+};
}

pass_on!(&S, Box<S>, Rc<S>, Arc<S>);
