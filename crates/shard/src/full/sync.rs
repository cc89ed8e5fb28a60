//! Leaving gradients local: by `no_sync`, and for gradient accumulation.

use overdrive_core::{AveragedBy, GradientSync, OptimizerError, PendingSum, SyncError};
use overdrive_ffi::TensorId;
use tch::Tensor;

use super::FullyShardedDataParallel;
use super::engine::PART;
use super::meeting::Event;
use crate::error::ShardError;

/// While this guard lives, backward passes leave the gradients local. Made by [`FullyShardedDataParallel::no_sync`].
#[must_use = "gradients are averaged again when the guard is dropped"]
#[derive(Debug)]
pub struct HeldBack<'a> {
    sharded: &'a FullyShardedDataParallel,
    previous: bool,
}

impl Drop for HeldBack<'_> {
    fn drop(&mut self) {
        self.sharded.shared.lock().held = self.previous;
    }
}

impl FullyShardedDataParallel {
    /// Leaves the gradients of the backward passes from here on local, until the guard is dropped. They add up whole, and
    /// the next pass averages the sum: each rank holds all gradients meanwhile, in the dtype in which they are averaged if
    /// that is wider. Without it, each pass averages and frees
    /// them, and the means of this rank's rows add up, which sends more and needs less memory. Every rank calls it.
    ///
    /// # Source
    /// `FSDPModule.set_requires_gradient_sync(False)`
    #[doc(alias = "set_requires_gradient_sync")]
    pub fn no_sync(&self) -> HeldBack<'_> {
        let previous = std::mem::replace(&mut self.shared.lock().held, true);
        HeldBack { sharded: self, previous }
    }
}

impl GradientSync for FullyShardedDataParallel {
    fn world_size(&self) -> usize {
        self.ranks.all.size()
    }

    fn averaged_by(&self) -> AveragedBy {
        AveragedBy::Backward
    }

    fn averages(&self, parameter: &Tensor) -> bool {
        self.averaged.contains(&TensorId::of(parameter))
    }

    fn counts_passes(&self) -> bool {
        self.ranks.all.size() > 1
    }

    fn hold_back(&self, hold: bool) -> Result<(), SyncError> {
        let mut engine = self.shared.lock();
        if engine.pass.is_some() {
            let reason = "a backward pass is under way: hold gradients back before it";
            return Err(ShardError::from(OptimizerError::NotNow { part: PART, reason }).into());
        }
        engine.held = hold;
        Ok(())
    }

    /// Reports no activity, because the caller already reports a backward pass.
    fn backward(&self, loss: &Tensor) -> Result<(), SyncError> {
        self.pass(|| Ok(loss.f_backward()?)).map_err(|error| match error {
            ShardError::Torch(own) => SyncError(Box::new(own)),
            other => other.into(),
        })
    }

    /// Takes part in the other ranks' backward pass, and gathers each unit with them.
    fn close_with_nothing(&self) -> Result<(), SyncError> {
        let mut engine = self.shared.lock();
        engine.begin_pass()?;
        Ok(engine.follow()?)
    }

    fn sum(&self, value: f64) -> Result<f64, SyncError> {
        self.start_sum(value)?()
    }

    fn start_sum(&self, value: f64) -> Result<PendingSum, SyncError> {
        let link = {
            let mut engine = self.shared.lock();
            engine.agree(Event::Sum, Ok(()))?;
            engine.link.clone()
        };
        let wait = self.ranks.all.start_sum(value).inspect_err(|_| link.breaks())?;
        Ok(Box::new(move || wait().inspect_err(|_| link.breaks())))
    }
}
