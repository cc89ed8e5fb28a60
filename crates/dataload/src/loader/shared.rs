//! The samples of a batch that all workers read together, because they would wait for each other otherwise.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::batch_samples::{Prepared, Stage, StageTimes};
use crate::loader::lock;
use crate::loader::stages::Stages;
use crate::{Cancellation, Collate, DataError};

/// The most pieces in which a batch is shared: one by one, many small samples would take longer than on one worker.
const MOST_PIECES: usize = 64;

pub(super) struct SharedBatch<T, S> {
    pub(super) number: usize,
    /// How many samples it has.
    pub(super) len: usize,
    /// What the samples that no worker has begun are made from, and whether there are some: every batch that follows asks.
    left: Mutex<std::vec::IntoIter<T>>,
    needs_help: AtomicBool,
    read: Mutex<Read<S>>,
}

struct Read<S> {
    /// Each sample until it is taken, or a panic that continues in the worker that makes the batch.
    samples: Vec<Option<Caught<S>>>,
    missing: usize,
}

/// A sample, and what the collate function has made of it already.
pub(crate) type Ready<S> = Result<(S, Option<Prepared>), DataError>;

/// The same, or the panic of what should have made it.
pub(crate) type Caught<S> = std::thread::Result<Ready<S>>;

impl<T, S> SharedBatch<T, S> {
    pub(super) fn new(number: usize, from: Vec<T>) -> Self {
        let read = Read { samples: from.iter().map(|_| None).collect(), missing: from.len() };
        let (len, needs_help) = (from.len(), AtomicBool::new(!from.is_empty()));
        Self { number, len, left: Mutex::new(from.into_iter()), needs_help, read: Mutex::new(read) }
    }

    /// Whether no worker has begun some of its samples.
    pub(super) fn needs_help(&self) -> bool {
        self.needs_help.load(Relaxed)
    }

    /// What the next samples are made from, and the position of the first.
    fn begin(&self) -> Option<(usize, Vec<T>)> {
        if !self.needs_help() {
            return None;
        }
        let mut left = lock(&self.left);
        let start = self.len - left.len();
        let piece: Vec<T> = left.by_ref().take(self.len.div_ceil(MOST_PIECES)).collect();
        self.needs_help.store(left.len() > 0, Relaxed);
        (!piece.is_empty()).then_some((start, piece))
    }

    /// Makes samples that no worker has begun, until all are. True for the worker that has made the last one: it makes
    /// the batch. So none waits for a slow sample but the worker that is in it. `get` returns a sample, and the number of
    /// its draw.
    pub(super) fn help<C: Collate<S, Batch = B>, B>(
        &self,
        stages: &Stages<C, B>,
        epoch: u64,
        cancelled: &Cancellation,
        get: impl Fn(T) -> Result<(S, u64), DataError>,
    ) -> bool {
        let reading = Cell::new(Duration::ZERO);
        let ready = |from: T| {
            cancelled.check()?;
            let begun = Instant::now();
            let (mut sample, draw) = get(from)?;
            reading.set(reading.get() + begun.elapsed());
            let prepared = stages.collate.prepare(&mut sample, draw, epoch);
            Ok((sample, prepared))
        };
        let mut is_last = false;
        while let Some((start, piece)) = self.begin() {
            let outcome = |from: T| catch_unwind(AssertUnwindSafe(|| ready(from)));
            let outcomes: Vec<_> = piece.into_iter().map(outcome).collect();
            let mut read = lock(&self.read);
            read.missing -= outcomes.len();
            is_last = read.missing == 0;
            let samples = read.samples[start..].iter_mut();
            samples.zip(outcomes).for_each(|(sample, outcome)| *sample = Some(outcome));
        }
        if !reading.get().is_zero() {
            stages.counters.worked(StageTimes::of(Stage::Read, reading.get()));
        }
        is_last
    }

    /// The sample at this position of the batch; `None` where it was taken before. A panic continues here.
    pub(super) fn take(&self, position: usize) -> Option<Ready<S>> {
        lock(&self.read).samples.get_mut(position)?.take().map(continued)
    }

    /// The samples that were not taken. All were read: the batch is made now, or has failed.
    pub(super) fn take_all(&self) -> impl Iterator<Item = Caught<S>> + use<T, S> {
        std::mem::take(&mut lock(&self.read).samples).into_iter().flatten()
    }
}

/// Continues the panic of what should have made a sample.
pub(super) fn continued<S>(outcome: Caught<S>) -> Ready<S> {
    outcome.unwrap_or_else(|payload| resume_unwind(payload))
}
