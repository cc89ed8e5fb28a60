//! Leaving gradients local: by `no_sync`, and for gradient accumulation.

use overdrive_core::{AveragedBy, GradientSync, PendingSum, SyncError};
use overdrive_ffi::TensorId;
use tch::Tensor;

use super::ShardedDataParallel;
use crate::error::ShardError;

/// While this guard lives, backward passes leave the gradients local. Made by [`ShardedDataParallel::no_sync`].
#[must_use = "gradients are averaged again when the guard is dropped"]
#[derive(Debug)]
pub struct NoSync<'a> {
    sharded: &'a ShardedDataParallel,
    previous: bool,
}

impl Drop for NoSync<'_> {
    fn drop(&mut self) {
        self.sharded.held.set(self.previous);
    }
}

impl ShardedDataParallel {
    /// Leaves the gradients of the backward passes from here on local, until the guard is dropped. They add up, and the
    /// next pass averages the sum. Meanwhile each rank holds all gradients: without it, each pass averages and frees
    /// them, and the means add up, which sends more and needs less memory. If such a pass fails, it is this rank's
    /// error alone; the next pass that averages fails on all ranks then, unless all have called the optimizer's
    /// `zero_grad` before.
    ///
    /// # Source
    /// `DistributedDataParallel.no_sync`
    pub fn no_sync(&self) -> NoSync<'_> {
        NoSync { sharded: self, previous: self.held.replace(true) }
    }
}

impl GradientSync for ShardedDataParallel {
    fn world_size(&self) -> usize {
        self.group.size()
    }

    fn averaged_by(&self) -> AveragedBy {
        AveragedBy::Backward
    }

    fn averages(&self, parameter: &Tensor) -> bool {
        self.averaged.contains(&TensorId::of(parameter))
    }

    fn hold_back(&self, hold: bool) -> Result<(), SyncError> {
        self.outside_pass("hold_back")?;
        self.held.set(hold);
        Ok(())
    }

    /// Reports no activity, because the caller already reports a backward pass.
    fn backward(&self, loss: &Tensor) -> Result<(), SyncError> {
        self.pass(Some(loss)).map_err(|error| match error {
            ShardError::Torch(own) => SyncError(Box::new(own)),
            other => other.into(),
        })
    }

    fn close_with_nothing(&self) -> Result<(), SyncError> {
        Ok(self.pass(None)?)
    }

    fn sum(&self, value: f64) -> Result<f64, SyncError> {
        self.start_sum(value)?()
    }

    fn start_sum(&self, value: f64) -> Result<PendingSum, SyncError> {
        let link = self.link.clone();
        let wait = self.group.start_sum(value).inspect_err(|_| link.breaks())?;
        Ok(Box::new(move || wait().inspect_err(|_| link.breaks())))
    }
}
