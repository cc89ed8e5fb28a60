//! Requests to stop a run.

use std::time::Instant;

use crate::error::CheckpointError;
use crate::ranks::Ranks;

/// What can ask a run to stop: a time limit, or a signal.
pub(crate) struct Stop {
    pub at: Option<Instant>,
    /// Every how many steps the ranks agree on whether to stop.
    pub agree_every: u64,
    #[cfg(feature = "signal")]
    pub watch: Option<crate::signal::Watch>,
}

impl Stop {
    /// Whether a stop can be requested at all: the same on all ranks, because their options are the same.
    fn is_watched(&self) -> bool {
        #[cfg(feature = "signal")]
        let signals = self.watch.is_some();
        #[cfg(not(feature = "signal"))]
        let signals = false;
        signals || self.at.is_some()
    }

    /// Whether this process has been asked to stop.
    fn own(&self) -> bool {
        #[cfg(feature = "signal")]
        let signal = self.watch.as_ref().is_some_and(crate::signal::Watch::stop_requested);
        #[cfg(not(feature = "signal"))]
        let signal = false;
        signal || self.at.is_some_and(|at| Instant::now() >= at)
    }

    /// Whether any rank has been asked to stop.
    pub fn requested(&self, step: u64, ranks: &Ranks) -> Result<bool, CheckpointError> {
        match ranks.are_several() {
            false => Ok(self.own()),
            true if self.is_watched() && step.is_multiple_of(self.agree_every) => ranks.any(self.own()),
            true => Ok(false),
        }
    }
}
