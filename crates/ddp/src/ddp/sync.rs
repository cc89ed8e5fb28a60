//! Leaving gradients local: by `no_sync`, and for gradient accumulation.

use overdrive_core::{AveragedBy, GradientSync, PendingSum, SyncError};
use overdrive_ffi::TensorId;
use tch::Tensor;

use super::{DistributedDataParallel, HELD_BACK_UNUSED};
use crate::error::DdpError;

/// While this guard lives, the backward pass of each forward pass leaves the gradients local. Made by
/// [`DistributedDataParallel::no_sync`].
#[must_use = "gradients are averaged again when the guard is dropped"]
#[derive(Debug)]
pub struct NoSync<'a> {
    ddp: &'a DistributedDataParallel,
    previous: bool,
}

impl Drop for NoSync<'_> {
    fn drop(&mut self) {
        let mut state = self.ddp.state.borrow_mut();
        state.held = self.previous;
        // A forward pass under the guard does not belong to the next synchronised backward.
        state.outputs = None;
    }
}

impl DistributedDataParallel {
    /// Leaves the gradients of the forward passes from here on local, until the guard is dropped. They add up, and the
    /// next synchronised backward averages the sum.
    ///
    /// `overdrive-accum` needs no guard: it uses [`GradientSync::hold_back`].
    ///
    /// # Source
    /// `DistributedDataParallel.no_sync`
    pub fn no_sync(&self) -> NoSync<'_> {
        let previous = std::mem::replace(&mut self.state.borrow_mut().held, true);
        NoSync { ddp: self, previous }
    }
}

impl GradientSync for DistributedDataParallel {
    fn world_size(&self) -> usize {
        self.group.size()
    }

    fn averaged_by(&self) -> AveragedBy {
        AveragedBy::Backward
    }

    fn averages(&self, parameter: &Tensor) -> bool {
        self.averaged.contains(&TensorId::of(parameter))
    }

    /// May be called between a forward pass and its backward, when the reducer already expects that backward.
    fn hold_back(&self, hold: bool) -> Result<(), SyncError> {
        if self.state.borrow().joining.is_some() {
            return Err(DdpError::CannotHoldBack(
                "gradients cannot be held back by accumulation within join, where ranks run different numbers of \
                 windows: use no_sync, or give all ranks equally many windows",
            )
            .into());
        }
        if hold && self.skips_unused {
            return Err(DdpError::CannotHoldBack(HELD_BACK_UNUSED).into());
        }
        self.outside_backward("hold_back")?;
        self.hook_works()?;
        let held = std::mem::replace(&mut self.state.borrow_mut().held, hold);
        if hold && !held {
            self.reducer.borrow().disarm().map_err(DdpError::Torch)?;
            self.state.borrow_mut().needs_buffers = false;
        } else if held && !hold {
            self.arm()?;
        }
        Ok(())
    }

    /// Reports no activity, because the caller already reports a backward pass.
    fn backward(&self, loss: &Tensor) -> Result<(), SyncError> {
        let averages = {
            let state = self.state.borrow();
            state.held || state.outputs.is_some()
        };
        if !averages {
            return Err(DdpError::NoForward.into());
        }
        self.run_backward(loss).map_err(|error| match error {
            DdpError::Torch(own) => SyncError(Box::new(own)),
            between => between.into(),
        })
    }

    fn close_with_nothing(&self) -> Result<(), SyncError> {
        if self.skips_unused {
            return Err(DdpError::CannotHoldBack(HELD_BACK_UNUSED).into());
        }
        self.outside_backward("close_with_nothing")?;
        self.hook_works()?;
        let lowered = self.lower()?;
        let closed = self.reducer.borrow().close_with_nothing();
        drop(lowered);
        self.check_hook()?;
        self.state.borrow_mut().needs_buffers = true;
        Ok(closed.map_err(|source| self.failed("close_with_nothing", source))?)
    }

    fn sum(&self, value: f64) -> Result<f64, SyncError> {
        self.group.sum(value)
    }

    fn start_sum(&self, value: f64) -> Result<PendingSum, SyncError> {
        self.group.start_sum(value)
    }
}
