//! How a group ends: in order, or at once.

use std::time::{Duration, Instant};

use overdrive_ffi::c10d::GroupFailure;

use crate::error::DdpError;
use crate::group::ProcessGroup;

/// What each of several groups gets, though another one has taken all the time: libtorch learns of the end of NCCL's work
/// a tenth of a second after it.
const LEAST: Duration = Duration::from_secs(1);

impl ProcessGroup {
    /// Waits until collectives under way are done, and frees what the backend holds: first of the sub-groups, the newest
    /// first, then of this group. From then on each of their collectives is an error. Every rank calls it; a second call
    /// does nothing.
    ///
    /// # Errors
    /// [`TimedOut`](DdpError::TimedOut) when work is under way at the group's timeout: it is aborted then, and its results
    /// are undefined. The first error of several; all groups are closed in any case.
    ///
    /// # Syncs
    /// Waits for collectives under way, and over NCCL for the other ranks.
    ///
    /// # Source
    /// `torch.distributed.destroy_process_group`
    #[doc(alias = "destroy_process_group")]
    pub fn close(&self) -> Result<(), DdpError> {
        let (began, timeout) = (Instant::now(), self.timeout());
        let mut result = Ok(());
        for group in self.with_sub_groups() {
            let rest = timeout.saturating_sub(began.elapsed()).max(LEAST.min(timeout));
            let closed = group.engine().close(rest);
            result = result.and(closed.map_err(|source| DdpError::between(group.context("close"), source)));
        }
        result
    }

    /// Ends collectives under way, where the backend supports it (NCCL). Their results are undefined, and each further
    /// collective is an error. From then on, libtorch's watchdog no longer ends the process for this group: ranks that
    /// live can make a [`new_group`](Self::new_group) of those left over, and go on. After a failure of a sub-group over
    /// NCCL, abort the outermost group too: its monitor learns of the failure, and ends the process minutes later.
    ///
    /// # Errors
    /// When the backend refuses.
    ///
    /// # Source
    /// `_abort_process_group`
    #[doc(alias = "_abort_process_group")]
    pub fn abort(&self) -> Result<(), DdpError> {
        Ok(self.engine().abort()?)
    }

    /// What NCCL's watchdog has found by now; `None` for nothing, and over Gloo. A program that does not wait for its
    /// collectives can ask between two steps, [`abort`](Self::abort), and go on: the watchdog ends the process a minute
    /// after it has found something.
    ///
    /// # Errors
    /// None are known.
    ///
    /// # Syncs
    /// No.
    ///
    /// # Source
    /// `ProcessGroupNCCL::getError`
    #[doc(alias = "get_error")]
    pub fn failure(&self) -> Result<Option<GroupFailure>, DdpError> {
        Ok(self.engine().failure()?)
    }
}
