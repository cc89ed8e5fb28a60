//! The samples of a batch that all workers read together, because they would wait for each other otherwise.

use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use crate::batch_samples::Prepared;
use crate::loader::lock;
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

    /// Reads samples that no worker has begun, until all are. True for the worker that has read the last one: it makes
    /// the batch. So none waits for a slow sample but the worker that is in it.
    pub(super) fn help(&self, cancelled: &Cancellation, read: impl Fn(usize, u64) -> Ready<S>) -> bool {
        let len = self.draws.len();
        let piece = len.div_ceil(MOST_PIECES);
        let begin = |next: usize| (next < len).then_some(next + piece);
        let mut is_last = false;
        while let Ok(start) = self.next.fetch_update(Relaxed, Relaxed, begin) {
            let outcome = |&(index, place): &(usize, u64)| match cancelled.check() {
                Ok(()) => catch_unwind(AssertUnwindSafe(|| read(index, place))),
                Err(error) => Ok(Err(error)),
            };
            let outcomes: Vec<_> = self.draws.iter().skip(start).take(piece).map(outcome).collect();
            let mut read = lock(&self.read);
            read.missing -= outcomes.len();
            is_last = read.missing == 0;
            let samples = read.samples[start..].iter_mut();
            samples.zip(outcomes).for_each(|(sample, outcome)| *sample = Some(outcome));
        }
        is_last
    }

    /// The sample at this position of the batch; `None` where it was taken before. A panic continues here.
    pub(super) fn take(&self, position: usize) -> Option<Ready<S>> {
        let outcome = lock(&self.read).samples.get_mut(position)?.take()?;
        Some(outcome.unwrap_or_else(|payload| resume_unwind(payload)))
    }

    /// Drops the samples that were not taken. All were read: the batch is made, or has failed.
    pub(super) fn clear(&self) {
        let left = std::mem::take(&mut lock(&self.read).samples);
        drop(left);
    }
}
