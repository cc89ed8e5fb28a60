//! What was fetched so far.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

/// What this process has read of remote files since it began; see [`remote_stats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RemoteStats {
    /// Bytes that came from servers, those of answers that were cut and of lists included.
    pub fetched_bytes: u64,
    /// Bytes that were found in the cache instead. A part of a file counts once each time the file is opened.
    pub cached_bytes: u64,
    /// Bytes that were asked for and are not here yet; of a file that is fetched whole, all that is left of it.
    pub pending_bytes: u64,
    /// Requests that were sent, those that were made again included.
    pub requests: u64,
    /// Requests that failed and are made again, a few times: without an answer, with one that was cut or too short, or with
    /// the status of a server that is out of order or busy (408, 429, 500 and above).
    pub failed_requests: u64,
}

pub(super) static FETCHED: AtomicU64 = AtomicU64::new(0);
pub(super) static CACHED: AtomicU64 = AtomicU64::new(0);
pub(super) static REQUESTS: AtomicU64 = AtomicU64::new(0);
pub(super) static FAILED: AtomicU64 = AtomicU64::new(0);
static PENDING: AtomicU64 = AtomicU64::new(0);

/// What this process has read of remote files since it began. Does not wait; the numbers are not of one moment.
///
/// ```
/// use overdrive_dataload::remote_stats;
///
/// let before = remote_stats();
/// // .. an epoch ..
/// let now = remote_stats();
/// let (fetched, cached) = (now.fetched_bytes - before.fetched_bytes, now.cached_bytes - before.cached_bytes);
/// println!("{} MB fetched, {} MB found in the cache", fetched / 1_000_000, cached / 1_000_000);
/// ```
pub fn remote_stats() -> RemoteStats {
    RemoteStats {
        fetched_bytes: FETCHED.load(Relaxed),
        cached_bytes: CACHED.load(Relaxed),
        pending_bytes: PENDING.load(Relaxed),
        requests: REQUESTS.load(Relaxed),
        failed_requests: FAILED.load(Relaxed),
    }
}

pub(super) fn count(counter: &AtomicU64, by: u64) {
    counter.fetch_add(by, Relaxed);
}

/// Bytes that are under way, as long as it lives.
pub(super) struct Pending(u64);

impl Pending {
    pub(super) fn new(bytes: u64) -> Self {
        count(&PENDING, bytes);
        Self(bytes)
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        PENDING.fetch_sub(self.0, Relaxed);
    }
}
