//! What the loader has cost the training thread.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// What a [`DataLoader`](crate::DataLoader) has delivered, and how long the training thread waited for it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct LoaderStats {
    /// Batches delivered without an error.
    pub batches: u64,
    /// Seconds that the consuming thread spent inside the loader: starting epochs and waiting for batches. With
    /// `num_workers(0)` that is all of the loading.
    pub wait_seconds: f64,
}

impl LoaderStats {
    /// The mean wait for one batch in seconds, 0 before the first.
    pub fn wait_seconds_per_batch(&self) -> f64 {
        if self.batches == 0 { 0.0 } else { self.wait_seconds / self.batches as f64 }
    }
}

/// The counters behind [`LoaderStats`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    batches: AtomicU64,
    wait_nanoseconds: AtomicU64,
}

impl Counters {
    pub(crate) fn waited(&self, time: Duration) {
        self.wait_nanoseconds.fetch_add(time.as_nanos() as u64, Relaxed);
    }

    pub(crate) fn delivered(&self) {
        self.batches.fetch_add(1, Relaxed);
    }

    pub(crate) fn snapshot(&self) -> LoaderStats {
        let wait = Duration::from_nanos(self.wait_nanoseconds.load(Relaxed));
        LoaderStats { batches: self.batches.load(Relaxed), wait_seconds: wait.as_secs_f64() }
    }

    pub(crate) fn reset(&self) {
        self.batches.store(0, Relaxed);
        self.wait_nanoseconds.store(0, Relaxed);
    }
}
