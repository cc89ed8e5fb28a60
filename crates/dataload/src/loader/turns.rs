//! libtorch's threads and the workers take turns at the cores.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering::Relaxed, Ordering::SeqCst};
use std::thread::{ThreadId, current};
use std::time::Duration;

use crate::DataError;

/// With how many threads libtorch computes, see
/// [`compute_threads`](crate::DataLoaderBuilder::compute_threads).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ComputeThreads {
    /// While workers make batches, at least 1.
    pub beside_workers: i32,
    /// While all workers rest, at least `beside_workers` and at most 1024.
    pub alone: i32,
}

impl ComputeThreads {
    /// More than this are surely a mistake: libtorch ends the process where it cannot start them.
    const MOST: i32 = 1024;

    /// Checks the numbers beside how many batches are loaded ahead, if that is fixed.
    pub(crate) fn check(self, ahead: Option<usize>) -> Result<(), DataError> {
        let option = "compute_threads";
        match ahead {
            None => return Err(DataError::option(option, "a fixed number of workers and of batches ahead", "Auto")),
            Some(0) => return Err(DataError::option(option, "at least one worker", "num_workers(0)")),
            Some(1) => return Err(DataError::option(option, "at least two batches ahead", "prefetch_factor(1)")),
            Some(_) => {}
        }
        let Self { beside_workers, alone } = self;
        if !(1..=alone).contains(&beside_workers) || alone > Self::MOST {
            let expected = format!("1 to {} threads alone, and as many or fewer beside workers", Self::MOST);
            return Err(DataError::option(option, expected, format!("{beside_workers} and {alone}")));
        }
        Ok(())
    }
}

/// What workers are doing.
#[derive(Debug, Default)]
pub(crate) struct AtWork {
    /// How many batches are being made.
    making: AtomicUsize,
    /// Whether no batch is left to begin.
    exhausted: AtomicBool,
    /// About how many nanoseconds a batch takes; 0 before the first.
    nanoseconds: AtomicU64,
}

impl AtWork {
    /// Counts a batch as being made until the result is dropped.
    pub(crate) fn begin(&self) -> impl Drop + '_ {
        struct Making<'a>(&'a AtomicUsize);
        impl Drop for Making<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, SeqCst);
            }
        }
        self.making.fetch_add(1, SeqCst);
        Making(&self.making)
    }

    /// Records how long a batch has taken. It counts as twice as long as the ones before at most: one alone may have read
    /// what others need too.
    pub(crate) fn took(&self, time: Duration) {
        let most = self.time_of_a_batch().saturating_mul(2);
        self.nanoseconds.store(u64::try_from(time.min(most).as_nanos()).unwrap_or(u64::MAX).max(1), Relaxed);
    }

    /// About how long a batch takes; very long before the first is made.
    pub(crate) fn time_of_a_batch(&self) -> Duration {
        Duration::from_nanos(match self.nanoseconds.load(Relaxed) {
            0 => u64::MAX,
            time => time,
        })
    }

    pub(crate) fn no_batch_is_left(&self) {
        self.exhausted.store(true, SeqCst);
    }

    /// Whether the workers have made the last batch.
    pub(crate) fn have_ended(&self) -> bool {
        self.exhausted.load(SeqCst) && self.making.load(SeqCst) == 0
    }
}

/// Sets the number of threads of the training loop's thread while an epoch runs. When it is dropped, libtorch computes
/// alone.
#[derive(Debug)]
pub(crate) struct Turns {
    threads: ComputeThreads,
    /// The thread for which it was set last: the number is a property of the thread.
    set: Option<ThreadId>,
}

impl Turns {
    pub(crate) fn new(threads: ComputeThreads) -> Self {
        Self { threads, set: None }
    }

    pub(crate) fn compute(&mut self, workers_rest: bool) {
        let count = if workers_rest { self.threads.alone } else { self.threads.beside_workers };
        self.set = Some(current().id());
        // Others may have set it since.
        if tch::get_num_threads() != count {
            tch::set_num_threads(count);
        }
    }
}

impl Drop for Turns {
    fn drop(&mut self) {
        if self.set == Some(current().id()) {
            self.compute(true);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_slow_batch_counts_as_twice_as_long_as_those_before() {
        let (at_work, took) = (AtWork::default(), |time: u64| Duration::from_micros(time));
        assert!(at_work.time_of_a_batch() > took(1 << 40));
        for (time, expected) in [(500, 500), (20, 20), (3000, 40), (20, 20), (70, 40), (70, 70), (0, 0)] {
            at_work.took(took(time));
            assert_eq!(at_work.time_of_a_batch().as_micros(), expected);
        }
    }
}
