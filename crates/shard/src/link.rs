//! What a sharded optimizer and what averages its gradients know of each other.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use overdrive_core::OptimizerError;

use crate::error::ShardError;

#[derive(Clone, Debug, Default)]
pub(crate) struct Link(Arc<Known>);

#[derive(Debug, Default)]
struct Known {
    /// Communication has failed: ranks may have different gradients or parameters, or wait for what is not sent.
    is_broken: AtomicBool,
    /// Gradients of this rank alone were made since they were last averaged or freed.
    is_local: AtomicBool,
    /// How often gradients were freed.
    freed: AtomicU64,
}

impl Link {
    /// Refuses to go on after communication has failed.
    pub(crate) fn check(&self, part: &'static str) -> Result<(), OptimizerError> {
        if !self.0.is_broken.load(Relaxed) {
            return Ok(());
        }
        let reason =
            "communication has failed before, which the other ranks may not know: start anew from a checkpoint";
        Err(OptimizerError::NotNow { part, reason })
    }

    pub(crate) fn breaks(&self) {
        self.0.is_broken.store(true, Relaxed);
    }

    /// Remembers whether communication has failed.
    pub(crate) fn watch<T>(&self, done: Result<T, ShardError>) -> Result<T, ShardError> {
        if matches!(done, Err(ShardError::Ddp(_))) {
            self.breaks();
        }
        done
    }

    pub(crate) fn is_local(&self) -> bool {
        self.0.is_local.load(Relaxed)
    }

    pub(crate) fn set_local(&self, is_local: bool) {
        self.0.is_local.store(is_local, Relaxed);
    }

    pub(crate) fn freed(&self) -> u64 {
        self.0.freed.load(Relaxed)
    }

    /// All gradients are freed.
    pub(crate) fn free(&self) {
        self.0.freed.fetch_add(1, Relaxed);
        self.set_local(false);
    }
}
