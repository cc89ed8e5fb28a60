//! What crates other than `overdrive-ddp` need from the ranks of a job.

use tch::Tensor;

use crate::{SingleProcess, SyncError};

/// Ranks that make a decision together by exchanging a number: where to resume, when to stop.
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

    /// The maximum of `value` over all ranks; every rank gets it.
    ///
    /// # Errors
    /// When a rank is gone, or the timeout has passed.
    ///
    /// # Syncs
    /// Waits for every rank.
    fn max(&self, value: i64) -> Result<i64, SyncError>;

    /// The sum of `value` over all ranks, in two's complement; every rank gets it. By default made of as many `max` as there
    /// are ranks.
    ///
    /// # Errors
    /// When a rank is gone, or the timeout has passed.
    ///
    /// # Syncs
    /// Waits for every rank.
    fn sum(&self, value: i64) -> Result<i64, SyncError> {
        let own = self.rank();
        (0..self.world_size()).try_fold(0, |sum: i64, rank| {
            let of_rank = self.max(if rank == own { value } else { i64::MIN })?;
            Ok(sum.wrapping_add(of_rank))
        })
    }
}

/// Ranks that skip an optimizer's step together or not at all ([`Optimizer::skip_agreement`](crate::Optimizer)).
///
/// # Source
/// `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`
pub trait SkipAgreement {
    /// Overwrites a float32 scalar, 1 where this rank's gradients held an infinity or NaN and 0 otherwise, by the maximum
    /// over all ranks. Every rank calls it.
    ///
    /// # Errors
    /// When a rank is gone, or the timeout has passed.
    ///
    /// # Syncs
    /// Over Gloo, waits for every rank; over NCCL, only the device does.
    fn agree(&self, found_inf: &Tensor) -> Result<(), SyncError>;
}

impl<R: RankGroup + ?Sized> RankGroup for &R {
    fn rank(&self) -> usize {
        (**self).rank()
    }

    fn world_size(&self) -> usize {
        (**self).world_size()
    }

    fn max(&self, value: i64) -> Result<i64, SyncError> {
        (**self).max(value)
    }

    fn sum(&self, value: i64) -> Result<i64, SyncError> {
        (**self).sum(value)
    }
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
