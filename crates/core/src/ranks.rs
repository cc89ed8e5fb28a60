//! What a crate that is not about ranks asks of those that train together.

use crate::{SingleProcess, SyncError};

/// Processes that decide something together by small numbers: where to resume, when to stop.
///
/// Every rank makes the same calls in the same order.
///
/// # Source
/// `torch.distributed.ProcessGroup`
pub trait RankGroup: Send + Sync {
    /// This process's number, from 0 on.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn world_size(&self) -> usize;

    /// The largest of the ranks' numbers, which all of them get.
    ///
    /// # Errors
    /// When a rank is gone, or the timeout has passed.
    ///
    /// # Syncs
    /// Waits for every rank.
    fn max(&self, value: i64) -> Result<i64, SyncError>;
}

impl RankGroup for SingleProcess {
    fn rank(&self) -> usize {
        0
    }

    fn world_size(&self) -> usize {
        1
    }

    fn max(&self, value: i64) -> Result<i64, SyncError> {
        Ok(value)
    }
}
