//! Makes sure that an optimizer has only one schedule at a time.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use overdrive_core::{Optimizer, OptimizerId};

use crate::ScheduleError;

static CLAIMED: Mutex<BTreeSet<OptimizerId>> = Mutex::new(BTreeSet::new());

/// The exclusive right to set an optimizer's rates, until the claim and all its clones are dropped.
#[derive(Clone, Debug)]
pub(crate) struct Claim(Arc<Claimed>);

#[derive(Debug)]
struct Claimed(OptimizerId);

fn claimed() -> MutexGuard<'static, BTreeSet<OptimizerId>> {
    CLAIMED.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Claim {
    /// Claims `opt`; an error if another schedule has claimed it.
    pub(crate) fn of(opt: &(impl Optimizer + ?Sized)) -> Result<Self, ScheduleError> {
        match claimed().insert(opt.id()) {
            true => Ok(Self(Arc::new(Claimed(opt.id())))),
            false => Err(ScheduleError::AlreadyScheduled),
        }
    }

    /// An error if `opt` is not the claimed optimizer.
    pub(crate) fn check(&self, opt: &(impl Optimizer + ?Sized)) -> Result<(), ScheduleError> {
        if self.0.0 == opt.id() { Ok(()) } else { Err(ScheduleError::OtherOptimizer) }
    }
}

impl Drop for Claimed {
    fn drop(&mut self) {
        claimed().remove(&self.0);
    }
}
