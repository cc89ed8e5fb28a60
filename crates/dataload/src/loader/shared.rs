//! The samples of a batch that all workers read together, because they would wait for each other otherwise.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::batch_samples::Prepared;
use crate::{Cancellation, DataError};

/// The most pieces in which a batch is shared: one by one, many small samples would take longer than on one worker.
const MOST_PIECES: usize = 64;

pub(super) struct SharedBatch<S> {
    pub(super) number: usize,
    /// The index of each sample, and its position in the order of all ranks.
    draws: Vec<(usize, u64)>,
    /// The first sample that no worker has begun.
    next: AtomicUsize,
    read: Mutex<Read<S>>,
}

struct Read<S> {
    /// Each sample until it is taken, or a panic that continues in the worker that makes the batch.
    samples: Vec<Option<std::thread::Result<Ready<S>>>>,
    missing: usize,
}

/// A sample, and what the collate function has made of it already.
pub(super) type Ready<S> = Result<(S, Option<Prepared>), DataError>;

impl<S> SharedBatch<S> {
    pub(super) fn new(number: usize, draws: Vec<(usize, u64)>) -> Self {
        let read = Read { samples: draws.iter().map(|_| None).collect(), missing: draws.len() };
        Self { number, draws, next: AtomicUsize::new(0), read: Mutex::new(read) }
    }

    /// How many samples it has.
    pub(super) fn len(&self) -> usize {
        self.draws.len()
    }

    fn read(&self) -> MutexGuard<'_, Read<S>> {
        self.read.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reads samples that no worker has begun, until all are. True for the worker that has read the last one: it makes
    /// the batch. So none waits for a slow sample but the worker that is in it.
    pub(super) fn help(&self, cancelled: &Cancellation, read: impl Fn(usize, u64) -> Ready<S>) -> bool {
        let piece = self.draws.len().div_ceil(MOST_PIECES);
        let mut is_last = false;
        while self.next.load(Relaxed) < self.draws.len() {
            let start = self.next.fetch_add(piece, Relaxed);
            for (position, &(index, place)) in self.draws.iter().enumerate().skip(start).take(piece) {
                let outcome = match cancelled.check() {
                    Ok(()) => catch_unwind(AssertUnwindSafe(|| read(index, place))),
                    Err(error) => Ok(Err(error)),
                };
                let mut read = self.read();
                read.samples[position] = Some(outcome);
                read.missing -= 1;
                is_last = read.missing == 0;
            }
        }
        is_last
    }

    /// The sample at this position of the batch; `None` where it was taken before. A panic continues here.
    pub(super) fn take(&self, position: usize) -> Option<Ready<S>> {
        let outcome = self.read().samples.get_mut(position)?.take()?;
        Some(outcome.unwrap_or_else(|payload| resume_unwind(payload)))
    }
}
