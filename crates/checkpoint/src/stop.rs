//! What may ask a run to stop.

use std::time::Instant;

use crate::error::CheckpointError;
use crate::ranks::Ranks;

/// A time, a signal.
pub(crate) struct Stop {
    pub at: Option<Instant>,
    /// After how many steps ranks ask each other.
    pub agree_every: u64,
    #[cfg(feature = "signal")]
    pub watch: Option<crate::signal::Watch>,
}

impl Stop {
    /// Whether anything may: the same on all ranks, whose options are.
    fn is_watched(&self) -> bool {
        #[cfg(feature = "signal")]
        let signals = self.watch.is_some();
        #[cfg(not(feature = "signal"))]
        let signals = false;
        signals || self.at.is_some()
    }

    /// Whether this process has been asked.
    fn own(&self) -> bool {
        #[cfg(feature = "signal")]
        let signal = self.watch.as_ref().is_some_and(crate::signal::Watch::stop_requested);
        #[cfg(not(feature = "signal"))]
        let signal = false;
        signal || self.at.is_some_and(|at| Instant::now() >= at)
    }

    /// Whether any rank has been asked.
    pub fn requested(&self, step: u64, ranks: &Ranks) -> Result<bool, CheckpointError> {
        match ranks.are_several() {
            false => Ok(self.own()),
            true if self.is_watched() && step.is_multiple_of(self.agree_every) => ranks.any(self.own()),
            true => Ok(false),
        }
    }
}
