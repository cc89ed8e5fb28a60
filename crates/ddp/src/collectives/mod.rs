//! Collectives on tensors. Each has a form that waits, and one named `_async` that returns a [`Work`](crate::Work).

mod batch;
mod coalesced;
mod exchange;
mod gather;
mod metrics;
mod objects;
mod reduce;
mod scatter;
mod send;

use std::time::Duration;

use overdrive_ffi::TensorList;
use overdrive_ffi::c10d::{self, Collective, CollectiveKind};
use tch::Tensor;

use crate::check;
use crate::error::DdpError;
use crate::group::ProcessGroup;
use crate::work::Work;
pub use batch::P2pOp;

/// What a collective reads and writes.
#[derive(Default)]
struct Parts<'a> {
    inputs: &'a [Tensor],
    outputs: &'a [Tensor],
    splits: Option<(&'a [i64], &'a [i64])>,
    tag: i32,
    timeout: Option<Duration>,
}

impl ProcessGroup {
    fn start<T>(
        &self,
        op: &'static str,
        kind: CollectiveKind,
        parts: &Parts<'_>,
        finish: impl FnOnce(&c10d::Work) -> Result<T, DdpError> + Send + 'static,
    ) -> Result<Work<T>, DdpError> {
        let (inputs, outputs) = (TensorList::new(parts.inputs)?, TensorList::new(parts.outputs)?);
        let collective = Collective {
            kind,
            inputs: Some(&inputs),
            outputs: Some(&outputs),
            splits: parts.splits,
            tag: parts.tag,
            timeout: parts.timeout,
        };
        let context = self.context(op);
        let work = {
            // Tensors that require gradients are read and written in place, outside of autograd.
            let _no_grad = tch::no_grad_guard();
            self.engine().start(&collective).map_err(|source| DdpError::between(context.clone(), source))?
        };
        Ok(Work::new(work, context, finish))
    }

    /// Waits until all ranks have called it.
    ///
    /// # Errors
    /// When a rank has exited, or does not call it within the group's timeout.
    ///
    /// # Syncs
    /// Waits for all ranks.
    ///
    /// # Source
    /// `torch.distributed.barrier`
    pub fn barrier(&self) -> Result<(), DdpError> {
        self.barrier_async()?.wait()
    }

    /// Starts [`barrier`](Self::barrier); [`Work::wait`](crate::Work::wait) waits for its end.
    ///
    /// # Errors
    /// When the backend refuses.
    ///
    /// # Syncs
    /// No: it does not wait for the other ranks, unless the group has [`verify`](crate::ProcessGroupBuilder::verify).
    pub fn barrier_async(&self) -> Result<Work, DdpError> {
        let work = self.start("barrier", CollectiveKind::Barrier, &Parts::default(), |_| Ok(()))?;
        Ok(if self.backend() == crate::Backend::Gloo { work } else { work.on_host(self.timeout()) })
    }

    /// Waits for a collective of small tensors on [`device`](Self::device) that the host is about to read: where only
    /// the stream waits, the read would hang if a rank is missing.
    pub(crate) fn on_host<T>(&self, work: Work<T>) -> Result<T, DdpError> {
        if check::carried_by_nccl(self, self.device()) { work.on_host(self.timeout()).wait() } else { work.wait() }
    }

    /// Waits until all ranks have called it; rank 0 learns which have not.
    ///
    /// # Errors
    /// When a rank does not call it within `timeout`: [`DdpError::MissingRanks`] on rank 0, naming the first missing
    /// rank, or all of them with `wait_all_ranks`; [`DdpError::TimedOut`] on the others.
    ///
    /// # Syncs
    /// Waits for all ranks.
    ///
    /// # Source
    /// `torch.distributed.monitored_barrier`
    pub fn monitored_barrier(&self, timeout: Duration, wait_all_ranks: bool) -> Result<(), DdpError> {
        if self.backend() == crate::Backend::Nccl {
            let reason = "only Gloo supports it: make a group over Gloo, or over both backends".to_owned();
            return Err(DdpError::Unsupported { op: "monitored_barrier", reason });
        }
        let Err(source) = self.engine().monitored_barrier(timeout, wait_all_ranks) else { return Ok(()) };
        let context = self.context("monitored_barrier");
        match missing_ranks(source.message()) {
            Some(ranks) if self.rank() == 0 => {
                Err(DdpError::MissingRanks { context: Box::new(context), ranks, source })
            }
            _ => Err(DdpError::between(context, source)),
        }
    }
}

/// The ranks in libtorch's `[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 1000 ms`.
fn missing_ranks(message: &str) -> Option<Vec<usize>> {
    let (before, _) = message.split_once(" failed to pass monitoredBarrier")?;
    let list = before.rsplit_once("Ranks ").or_else(|| before.rsplit_once("Rank "))?.1;
    list.split(',').map(|rank| rank.trim().parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::missing_ranks;

    #[test]
    fn libtorchs_lists_of_missing_ranks() {
        let ranks = |text: &str| missing_ranks(text);
        assert_eq!(ranks("[Rank 0]: Rank 1 failed to pass monitoredBarrier in 500 ms"), Some(vec![1]));
        assert_eq!(ranks("[Rank 0]: Ranks 1, 2 failed to pass monitoredBarrier in 500 ms"), Some(vec![1, 2]));
        assert_eq!(ranks("Connection closed by peer"), None);
        assert_eq!(ranks("Rank x failed to pass monitoredBarrier"), None);
    }
}
