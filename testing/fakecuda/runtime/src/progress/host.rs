//! What the host learns of the device: queries, times, and what is done.

use super::{Clock, Progress, Ticket};
use crate::error::CudaError;
use crate::guard;

impl Progress {
    /// Lets so many queries in a row find work that is not done; the next one runs it.
    pub fn set_polls(&mut self, polls: u64) {
        (self.polls, self.not_ready) = (polls, 0);
    }

    /// Whether the work of a query has to run now: a program that asks until it is done would ask for ever.
    fn is_asked_often(&mut self) -> bool {
        self.not_ready += 1;
        self.was_asked_often |= self.not_ready == self.polls + 1;
        self.not_ready > self.polls
    }

    /// Whether the host has waited by asking, once for each such wait.
    pub fn has_waited_by_asking(&mut self) -> bool {
        std::mem::take(&mut self.was_asked_often)
    }

    /// The host asks whether a stream has no work left. Once it hears so, it has waited for it.
    pub fn query(&mut self, stream: u64) -> Option<bool> {
        let target = self.target(stream)?;
        let is_ready = self.is_idle(stream)? || self.is_asked_often();
        Some(is_ready && self.reach(&target))
    }

    /// The host asks whether an event has happened, as with [`Self::query`].
    pub fn query_event(&mut self, event: u64) -> Option<bool> {
        let target = self.target_of_event(event)?;
        let is_ready = self.has_happened(event)? || self.is_asked_often();
        Some(is_ready && self.reach(&target))
    }

    /// The nanoseconds from one event to another, as `cudaEventElapsedTime` has them.
    ///
    /// # Errors
    /// Without timing or a recording, the handle is wrong; before both have happened they are not ready.
    pub fn elapsed(&self, begin: u64, end: u64) -> Result<i64, CudaError> {
        let both = [begin, end].map(|event| self.events.get(&event));
        let [Some(begin), Some(end)] = both else { return Err(CudaError::INVALID_RESOURCE_HANDLE) };
        if [begin, end].iter().any(|event| !event.is_timed || event.at.is_none()) {
            return Err(CudaError::INVALID_RESOURCE_HANDLE);
        }
        if [begin, end].iter().any(|event| !event.has_happened) {
            return Err(CudaError::NOT_READY);
        }
        Ok(end.time as i64 - begin.time as i64)
    }

    /// What the host has waited for.
    pub fn host(&self) -> &Clock {
        &self.host
    }

    /// A guarded copy was put into a stream, with this number.
    pub fn hold(&mut self, ticket: Ticket, stream: u64, number: u64) {
        self.guarded.push((ticket, stream, number));
    }

    /// The host knows now that all of this is done.
    pub(super) fn know(&mut self, clock: &Clock, time: u64) {
        self.host.join(clock);
        self.host_time = self.host_time.max(time);
        self.not_ready = 0;
        let host = self.host.clone();
        self.let_go(&host);
    }

    /// The host may touch what these operations have copied.
    pub(super) fn let_go(&mut self, done: &Clock) {
        let is_done = |(_, stream, number): &mut (Ticket, u64, u64)| done.has_seen(*stream, *number);
        self.guarded.extract_if(.., is_done).for_each(|(ticket, ..)| guard::release(&ticket));
    }
}
