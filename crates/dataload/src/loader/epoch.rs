//! One pass over the data.

use std::fmt;
use std::iter::FusedIterator;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use overdrive_core::{Activity, activity, is_taken_ahead, when_handed_out};

use crate::loader::budget::{Allowance, Budget};
use crate::loader::position::{EpochPosition, Given, Mark};
use crate::loader::serve::make_guarded;
use crate::loader::stats::Counters;
use crate::loader::transfer::Used;
use crate::loader::tuner::{Size, Tuner};
use crate::loader::turns::Turns;
use crate::loader::work::{EpochWork, Made, Outcome};
use crate::loader::worker::{MOST_IN_FLIGHT, WorkerOptions, Workers};
use crate::tensor_batch::Footprint;
use crate::{Cancellation, DataError};

/// With `batches_per_epoch`, the epoch ends after this many batches in a row have lost all samples: by then hardly any
/// sample is good.
const MAX_EMPTY_BATCHES: usize = 256;

/// The batches of one epoch, in order; made by [`DataLoader::iter`](crate::DataLoader::iter) and
/// [`DataLoader::epoch`](crate::DataLoader::epoch).
///
/// Workers start when the epoch is made, not when the first batch is asked for: an epoch made before an evaluation has
/// its first batches ready afterwards. An error ends the epoch; the loader can be used again. With a stream, the next
/// epoch continues after the last batch that was taken; see [`DataLoader`](crate::DataLoader). Dropping the epoch stops
/// the workers after the samples that they are reading, and joins them; workers that are still in their samples after
/// 5 s are left running, with a warning and in [`LoaderStats::detached`](crate::LoaderStats::detached).
#[must_use = "its workers are already loading; an epoch that is not iterated wastes their work"]
pub struct Epoch<B> {
    crew: Crew<B>,
    /// Dropped after the crew, which may hold batches.
    used: Option<Used>,
    position: SharedPosition,
    /// How many batches the epoch has, where that is known.
    batches: Option<usize>,
    counters: Arc<Counters>,
    tuning: Tuning<B>,
    last_taken: Option<Instant>,
    turns: Option<Turns>,
    /// How many batches in a row have lost all samples. They are counted here, where batches come in order for any number
    /// of workers.
    empty_in_a_row: usize,
}

/// Written by the epoch, and read by the loader to save its state.
pub(crate) type SharedPosition = Arc<Mutex<EpochPosition>>;

/// Adjusts the number of workers while the epoch runs.
pub(crate) struct Tuning<B> {
    pub(crate) tuner: Arc<Mutex<Tuner>>,
    pub(crate) measure: Option<fn(&B) -> Footprint>,
    /// For the batches made ahead; `None` where their bytes are not known.
    pub(crate) allowance: Option<Allowance<B>>,
}

/// What makes the batches.
enum Crew<B> {
    /// With threads that only read ahead, where it does.
    CallingThread(Arc<dyn EpochWork<B>>, Option<Box<Workers<B>>>),
    Workers(Box<Workers<B>>),
    Failed(DataError),
    Ended,
}

/// Locks a mutex, also after a panic of a thread that held it.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<B: Send + 'static> Epoch<B> {
    pub(crate) fn start(
        work: Result<Arc<dyn EpochWork<B>>, DataError>,
        position: EpochPosition,
        batches: Option<usize>,
        worker_options: WorkerOptions,
        tuning: Tuning<B>,
        counters: Arc<Counters>,
    ) -> Self {
        let (first, epoch) = (position.now().batch, position.now().epoch);
        let left = batches.map_or(MOST_IN_FLIGHT, |batches| batches.saturating_sub(position.now().taken()));
        let Size { workers, in_flight } = lock(&tuning.tuner).size();
        // More threads than batches have something to do where they decode these together.
        let parts = work.as_ref().ok().filter(|_| workers > 0).map_or(0, |work| {
            work.shared_by(workers);
            work.parts_ahead()
        });
        let (workers, in_flight) = (workers.min(left.max(parts)), in_flight.min(left).max(1));
        tracing::debug!(epoch, batches, first, workers, in_flight, "epoch starts");
        counters.set_size(workers, in_flight);
        let turns = worker_options.compute_threads.map(Turns::new);
        let crew = match work {
            Err(error) => Crew::Failed(error),
            Ok(work) if workers == 0 => {
                let readers = if left == 0 { 0 } else { worker_options.readers };
                // The user's function is for workers.
                let options = WorkerOptions { init: None, ..worker_options };
                let readers = (readers > 0).then(|| Workers::spawn(work.clone(), readers, 0, first, options, None));
                let readers = readers.transpose().unwrap_or_else(|error| {
                    tracing::warn!(%error, "the calling thread decodes alone");
                    None
                });
                Crew::CallingThread(work, readers.map(Box::new))
            }
            Ok(work) => {
                let budget = tuning.allowance.map(Budget::new);
                let started = Workers::spawn(work, workers, in_flight, first, worker_options, budget);
                started.map_or_else(Crew::Failed, |workers| Crew::Workers(Box::new(workers)))
            }
        };
        let position = Arc::new(Mutex::new(position));
        Self { crew, used: None, position, batches, counters, tuning, last_taken: None, turns, empty_in_a_row: 0 }
    }

    pub(crate) fn position_of(&self) -> &SharedPosition {
        &self.position
    }

    #[cfg(feature = "progress")]
    pub(crate) fn counters(&self) -> &Arc<Counters> {
        &self.counters
    }

    /// How many finished batches wait to be taken. While this is not 0, the next batch is there at once, unless a
    /// slower earlier one is due first.
    pub fn ready(&self) -> usize {
        match &self.crew {
            Crew::Workers(workers) => workers.ready(),
            _ => 0,
        }
    }

    fn make(&mut self) -> Result<Option<Made<B>>, DataError> {
        match &mut self.crew {
            Crew::CallingThread(work, readers) => {
                let made = make_guarded(&**work, &Cancellation::default());
                readers.iter().for_each(|readers| readers.read_ahead());
                made
            }
            Crew::Workers(workers) => workers.receive(lock(&self.position).now().batch),
            Crew::Failed(_) => match std::mem::replace(&mut self.crew, Crew::Ended) {
                Crew::Failed(error) => Err(error),
                _ => Ok(None),
            },
            Crew::Ended => Ok(None),
        }
    }

    /// The next batch that is not empty.
    fn take(&mut self) -> Result<Option<(B, usize)>, DataError> {
        loop {
            let Some(mut made) = self.make()? else { return Ok(None) };
            if let Ok(Outcome::Batch { batch, uploaded: Some(uploaded), .. }) = &mut made.result {
                self.used.get_or_insert_with(|| uploaded.used());
                uploaded.adopt(batch)?;
            }
            if let Crew::Workers(workers) = &mut self.crew {
                workers.taken(&made);
            }
            let Made { number, result, mark, .. } = made;
            match result? {
                Outcome::Batch { batch, samples, .. } => {
                    self.empty_in_a_row = 0;
                    self.give(number, mark);
                    return Ok(Some((batch, samples)));
                }
                Outcome::Nothing | Outcome::Delivered => lock(&self.position).delivered(number, mark, Given::Nothing),
                Outcome::Later => {
                    self.empty_in_a_row += 1;
                    if let (MAX_EMPTY_BATCHES.., Some(batches)) = (self.empty_in_a_row, self.batches) {
                        return Err(DataError::StreamEnded { batch: number, batches });
                    }
                    lock(&self.position).delivered(number, mark, Given::Later);
                }
            }
        }
    }

    /// Counts a batch as trained on: at once, or, if a caller takes batches ahead of their use, when that caller hands
    /// it out.
    fn give(&self, number: usize, mark: Mark) {
        if !is_taken_ahead() {
            return lock(&self.position).delivered(number, mark, Given::Batch);
        }
        lock(&self.position).delivered(number, mark, Given::Ahead);
        let position = self.position.clone();
        when_handed_out(move || lock(&position).handed_out());
    }

    fn end(&mut self) {
        self.crew = Crew::Ended;
        self.used = None;
        self.turns = None;
    }

    /// Sets the number of threads for the step that begins.
    fn take_turns(&mut self) {
        if let (Some(turns), Crew::Workers(workers)) = (&mut self.turns, &self.crew) {
            turns.compute(workers.are_resting());
        }
    }

    fn tune(&mut self, batch: &B, asked: Instant) {
        let now = Instant::now();
        let last = self.last_taken.replace(now);
        let (Crew::Workers(workers), Some(last)) = (&mut self.crew, last) else { return };
        let bytes = self.tuning.measure.map_or(0, |measure| measure(batch).total());
        let size = lock(&self.tuning.tuner).observe(bytes, now - asked, now - last);
        if let Some(Size { workers: count, in_flight }) = size {
            // If no more threads can be started, the epoch continues with those that run.
            match workers.resize(count, in_flight) {
                Ok(()) => self.counters.set_size(count, in_flight),
                Err(error) => tracing::warn!(%error, "the number of workers could not be changed"),
            }
        }
    }
}

impl<B: Send + 'static> Iterator for Epoch<B> {
    type Item = Result<B, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        let mut waiting = activity(|| Activity::NextBatch(Arc::as_ptr(&self.counters).addr()));
        let asked = Instant::now();
        self.counters.asked(self.ready());
        let taken = self.take();
        match &taken {
            Ok(Some((batch, samples))) => {
                self.counters.delivered(*samples);
                waiting.set_samples(*samples as u64);
                self.tune(batch, asked);
                self.take_turns();
            }
            Ok(None) if !matches!(self.crew, Crew::Ended) => {
                lock(&self.position).ended();
                self.end();
            }
            Ok(None) => {}
            Err(error) => {
                tracing::debug!(%error, "epoch ends early");
                lock(&self.position).broken_off();
                self.end();
            }
        }
        self.counters.waited(asked.elapsed());
        taken.map(|taken| taken.map(|(batch, _)| batch)).transpose()
    }

    /// At most the remaining batches: an error may end the epoch earlier.
    fn size_hint(&self) -> (usize, Option<usize>) {
        match (&self.crew, self.batches) {
            (Crew::Ended, _) => (0, Some(0)),
            (_, batches) => (0, batches.map(|batches| batches.saturating_sub(lock(&self.position).now().taken()))),
        }
    }
}

impl<B: Send + 'static> FusedIterator for Epoch<B> {}

impl<B> Drop for Epoch<B> {
    /// The next epoch of a stream continues with the batches that were not taken.
    fn drop(&mut self) {
        lock(&self.position).broken_off();
    }
}

impl<B> fmt::Debug for Epoch<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Epoch")
            .field("position", &self.position)
            .field("batches", &self.batches)
            .finish_non_exhaustive()
    }
}
