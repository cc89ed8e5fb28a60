//! Which optimizers have a schedule: each has one at a time.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use overdrive_core::{Optimizer, OptimizerId};

use crate::ScheduleError;

static CLAIMED: Mutex<BTreeSet<OptimizerId>> = Mutex::new(BTreeSet::new());

/// The right to set an optimizer's rates, until it and its copies are dropped.
#[derive(Clone, Debug)]
pub(crate) struct Claim(Arc<Claimed>);

#[derive(Debug)]
struct Claimed(OptimizerId);

fn claimed() -> MutexGuard<'static, BTreeSet<OptimizerId>> {
    CLAIMED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Claim {
    /// The right to set the rates of `opt`, unless another schedule has it.
    pub(crate) fn of(opt: &(impl Optimizer + ?Sized)) -> Result<Self, ScheduleError> {
        match claimed().insert(opt.id()) {
            true => Ok(Self(Arc::new(Claimed(opt.id())))),
            false => Err(ScheduleError::AlreadyScheduled),
        }
    }

    /// An error for another optimizer than the one that was claimed.
    pub(crate) fn check(&self, opt: &(impl Optimizer + ?Sized)) -> Result<(), ScheduleError> {
        if self.0.0 == opt.id() { Ok(()) } else { Err(ScheduleError::OtherOptimizer) }
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        claimed().remove(&self.0);
    }
}
