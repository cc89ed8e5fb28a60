//! What the loader has done, and how much of the training thread's time it took.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::batch_samples::StageTimes;

/// What a [`DataLoader`](crate::DataLoader) has delivered, how long the training thread waited for it, and where the
/// workers' time went.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[non_exhaustive]
pub struct LoaderStats {
    /// Batches delivered without an error.
    pub batches: u64,
    /// Samples in them.
    pub samples: u64,
    /// Seconds that the consuming thread spent inside the loader: starting epochs and waiting for batches. With
    /// `num_workers(0)` that is all of the loading.
    pub wait_seconds: f64,
    /// Seconds of all workers together in `Dataset::get` or in reading a stream.
    pub read_seconds: f64,
    /// Seconds of all workers together in decoding.
    pub decode_seconds: f64,
    /// Seconds of all workers together in transforms.
    pub transform_seconds: f64,
    /// Seconds of all workers together in the rest of the collate function.
    pub collate_seconds: f64,
    /// Seconds of all workers together in pinning, and in starting copies to the device.
    pub transfer_seconds: f64,
    /// Samples that were skipped or replaced; see [`DataLoader::faults`](crate::DataLoader::faults).
    pub faults: u64,
    /// The mean number of finished batches when the training loop asked for one; near 0, the workers do not keep up.
    pub queue_depth: f64,
    /// The number of worker threads, now or in the last epoch.
    pub workers: u64,
    /// How many batches may be loaded ahead of the training loop.
    pub in_flight: u64,
    /// Workers and readers that had not stopped 5 s after their epoch was dropped, or when a batch timed out, and were
    /// left running: they are in a sample that may never end.
    pub detached: u64,
}

impl LoaderStats {
    /// The mean wait for one batch in seconds, 0 before the first.
    pub fn wait_seconds_per_batch(&self) -> f64 {
        if self.batches == 0 { 0.0 } else { self.wait_seconds / self.batches as f64 }
    }
}

impl fmt::Display for LoaderStats {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let each = |seconds: f64| 1e3 * seconds / self.batches.max(1) as f64;
        writeln!(f, "{} batches, {} samples, {} faults", self.batches, self.samples, self.faults)?;
        write!(f, "waited {:.3} s, {:.3} ms per batch; ", self.wait_seconds, each(self.wait_seconds))?;
        match self.workers {
            0 => writeln!(f, "no workers: each batch is made when it is asked for")?,
            workers => writeln!(
                f,
                "{:.1} batches ready on average; {workers} worker{}, at most {} batches ahead",
                self.queue_depth,
                if workers == 1 { "" } else { "s" },
                self.in_flight
            )?,
        }
        if self.detached > 0 {
            writeln!(f, "threads that did not stop with their epoch: {}", self.detached)?;
        }
        write!(
            f,
            "workers, ms per batch: read {:.3}, decode {:.3}, transform {:.3}, collate {:.3}, transfer {:.3}",
            each(self.read_seconds),
            each(self.decode_seconds),
            each(self.transform_seconds),
            each(self.collate_seconds),
            each(self.transfer_seconds)
        )
    }
}

/// The counters behind [`LoaderStats`].
#[derive(Debug, Default)]
pub(crate) struct Counters {
    batches: AtomicU64,
    samples: AtomicU64,
    asked: AtomicU64,
    ready: AtomicU64,
    faults: AtomicU64,
    wait_nanoseconds: AtomicU64,
    stage_nanoseconds: [AtomicU64; 5],
    workers: AtomicU64,
    in_flight: AtomicU64,
    detached: AtomicU64,
}

impl Counters {
    pub(crate) fn waited(&self, time: Duration) {
        self.wait_nanoseconds.fetch_add(time.as_nanos() as u64, Relaxed);
    }

    pub(crate) fn worked(&self, times: StageTimes) {
        for (counter, time) in self.stage_nanoseconds.iter().zip(times.0) {
            counter.fetch_add(time.as_nanos() as u64, Relaxed);
        }
    }

    pub(crate) fn asked(&self, ready: usize) {
        self.asked.fetch_add(1, Relaxed);
        self.ready.fetch_add(ready as u64, Relaxed);
    }

    pub(crate) fn delivered(&self, samples: usize) {
        self.batches.fetch_add(1, Relaxed);
        self.samples.fetch_add(samples as u64, Relaxed);
    }

    pub(crate) fn fault(&self) {
        self.faults.fetch_add(1, Relaxed);
    }

    pub(crate) fn detached(&self, workers: usize) {
        self.detached.fetch_add(workers as u64, Relaxed);
    }

    pub(crate) fn set_size(&self, workers: usize, in_flight: usize) {
        self.workers.store(workers as u64, Relaxed);
        self.in_flight.store(in_flight as u64, Relaxed);
    }

    pub(crate) fn snapshot(&self) -> LoaderStats {
        let seconds = |counter: &AtomicU64| Duration::from_nanos(counter.load(Relaxed)).as_secs_f64();
        let [read, decode, transform, collate, transfer] = self.stage_nanoseconds.each_ref().map(seconds);
        LoaderStats {
            batches: self.batches.load(Relaxed),
            samples: self.samples.load(Relaxed),
            wait_seconds: seconds(&self.wait_nanoseconds),
            read_seconds: read,
            decode_seconds: decode,
            transform_seconds: transform,
            collate_seconds: collate,
            transfer_seconds: transfer,
            faults: self.faults.load(Relaxed),
            queue_depth: self.ready.load(Relaxed) as f64 / self.asked.load(Relaxed).max(1) as f64,
            workers: self.workers.load(Relaxed),
            in_flight: self.in_flight.load(Relaxed),
            detached: self.detached.load(Relaxed),
        }
    }

    /// Sets everything to zero except the numbers of workers and batches ahead, which are not counters.
    pub(crate) fn reset(&self) {
        let Self { batches, samples, asked, ready, faults, wait_nanoseconds, detached, .. } = self;
        let counts = [batches, samples, asked, ready, faults, wait_nanoseconds, detached];
        counts.into_iter().chain(&self.stage_nanoseconds).for_each(|counter| counter.store(0, Relaxed));
    }
}
