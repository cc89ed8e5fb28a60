//! Collectives under way.

use std::time::{Duration, Instant};

use overdrive_ffi::c10d;

use crate::error::{Context, DdpError};

type Finish<T> = Box<dyn FnOnce(&c10d::Work) -> Result<T, DdpError> + Send>;

/// A collective under way; [`wait`](Self::wait) returns its result.
///
/// Until then the contents of the tensors that it writes to are undefined. Dropping it neither waits nor stops it.
///
/// # Source
/// `torch.distributed.Work`
#[must_use = "the collective is done only when it was waited for"]
pub struct Work<T = ()> {
    work: c10d::Work,
    /// Of a batch over Gloo: the others.
    before: Vec<Work>,
    context: Context,
    /// Over NCCL, how long [`wait`](Self::wait) blocks the host at most; `None` if only the stream waits.
    on_host: Option<Duration>,
    finish: Finish<T>,
}

impl<T> Work<T> {
    pub(crate) fn new(
        work: c10d::Work,
        context: Context,
        finish: impl FnOnce(&c10d::Work) -> Result<T, DdpError> + Send + 'static,
    ) -> Self {
        Self { work, before: Vec::new(), context, on_host: None, finish: Box::new(finish) }
    }

    /// Whether [`wait`](Self::wait) would return at once. Over Gloo, sends and receives report completion only after
    /// they were waited for, and reduce-scatters not even then.
    pub fn is_completed(&self) -> bool {
        self.before.iter().all(Work::is_completed) && self.work.is_completed()
    }

    /// Waits for the result: the host waits for Gloo and for a barrier, the current stream for NCCL.
    ///
    /// # Errors
    /// When another rank has exited, or does not take part within the group's timeout. Where only the stream waits,
    /// that is an error of a later collective, or ends the process ([`ProcessGroup`](crate::ProcessGroup)).
    ///
    /// # Syncs
    /// Over Gloo, yes, and for a barrier.
    pub fn wait(self) -> Result<T, DdpError> {
        self.before.into_iter().try_for_each(Work::wait)?;
        self.work.wait(self.on_host).map_err(|source| DdpError::between(self.context, source))?;
        (self.finish)(&self.work)
    }

    /// Waits for at most `timeout`, and may be called again; [`wait`](Self::wait) then returns the result.
    ///
    /// # Errors
    /// [`DdpError::TimedOut`] when it is not done by then, and as [`wait`](Self::wait). A send or receive over Gloo
    /// cannot be waited for again. Over NCCL, a wait as long as the group's timeout ends when libtorch's watchdog gives up
    /// too: [`abort`](crate::ProcessGroup::abort) the group then, or the watchdog ends the process.
    ///
    /// # Syncs
    /// Yes.
    pub fn wait_for(&self, timeout: Duration) -> Result<(), DdpError> {
        let began = Instant::now();
        let rest = || timeout.saturating_sub(began.elapsed()).max(Duration::from_millis(1));
        self.before.iter().try_for_each(|work| work.wait_for(rest()))?;
        self.work.wait_for(rest()).map_err(|source| DdpError::between(self.context.clone(), source))
    }

    /// The same collective with another result, computed from this one when it is waited for.
    pub fn and_then<U: 'static>(self, result: impl FnOnce(T) -> Result<U, DdpError> + Send + 'static) -> Work<U>
    where
        T: 'static,
    {
        let finish = self.finish;
        let work = Work::new(self.work, self.context, move |work| result(finish(work)?));
        Work { on_host: self.on_host, before: self.before, ..work }
    }

    /// One work for several.
    pub(crate) fn after(self, before: Vec<Work>) -> Self {
        Self { before, ..self }
    }

    /// Makes [`wait`](Self::wait) block the host, for at most `timeout`, over NCCL too: it then returns NCCL's errors.
    pub(crate) fn on_host(self, timeout: Duration) -> Self {
        Self { on_host: Some(timeout), ..self }
    }

    pub(crate) fn engine(&self) -> &c10d::Work {
        &self.work
    }
}

impl<T> std::fmt::Debug for Work<T> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Work({})", self.context)
    }
}
