//! Batches of a stream.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use crate::batch_samples::Stage;
use crate::loader::fault::{Fault, OnError};
use crate::loader::guard::{Place, guarded};
use crate::loader::lane::{Item, Lane, LanePlan, LanePosition};
use crate::loader::position::{Bounds, Identity, LaneBounds, Mark, Position, StreamMark};
use crate::loader::queue::{Origin, Queue};
use crate::loader::stages::Stages;
use crate::loader::work::{Content, EpochWork, Made, Source};
use crate::{BatchSamples, Cancellation, Collate, DataError, Deferred, IterableDataset};

pub(crate) struct Streamed<D: IterableDataset, C: Collate<D::Sample>> {
    pub(crate) dataset: Arc<D>,
    pub(crate) stages: Arc<Stages<C, C::Batch>>,
    pub(crate) options: StreamOptions,
    pub(crate) identity: Identity,
}

/// How a stream is cut into batches.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StreamOptions {
    pub(crate) batch_size: usize,
    pub(crate) drop_last: bool,
    pub(crate) shuffle: bool,
    pub(crate) shuffle_buffer: usize,
    pub(crate) shuffle_buffer_bytes: usize,
    pub(crate) interleave: usize,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) batches_per_epoch: Option<usize>,
}

impl<D, C> Source<C::Batch> for Streamed<D, C>
where
    D: IterableDataset + 'static,
    C: Collate<D::Sample> + 'static,
{
    fn begin(&self, position: &mut Position) -> Result<Arc<dyn EpochWork<C::Batch>>, DataError> {
        let StreamOptions { interleave, rank, world_size, .. } = self.options;
        let plan = LanePlan {
            seed: self.identity.seed,
            lanes: interleave,
            shuffle: self.options.shuffle,
            window: self.options.shuffle_buffer,
            window_bytes: self.options.shuffle_buffer_bytes,
            repeat: self.options.batches_per_epoch.is_some(),
        };
        let mark = position.mark.as_deref();
        let mut lanes = BTreeMap::new();
        for number in (rank..interleave).step_by(world_size) {
            let from = match mark {
                None => LanePosition::start_of(position.epoch),
                Some(mark) => *mark.lanes.get(&number).ok_or_else(|| {
                    let expected = format!("the merged states of all ranks (lane {number} is missing)");
                    DataError::option("state", expected, "the state of another rank")
                })?,
            };
            lanes.insert(number, Lane::at(self.dataset.clone(), plan, number, from));
        }
        let delivered = position.before.clone();
        let turn = mark.map_or(0, |mark| mark.turn) % lanes.len().max(1);
        let lanes = lanes.into_iter().collect();
        let limit = self.options.batches_per_epoch.map(|batches| batches.saturating_add(position.extra));
        let rest = !plan.repeat && mark.is_some() && position.batch == 0;
        let (next, reading) = (position.batch, turn);
        let sequence = Sequence { lanes, turn, reading, next, limit, making: 0, empty_in_a_row: 0, rest, ended: false };
        Ok(Arc::new(StreamEpoch {
            plan,
            settled: Condvar::new(),
            dataset: self.dataset.clone(),
            stages: self.stages.clone(),
            options: self.options,
            epoch: position.epoch,
            delivered,
            sequence: Mutex::new(sequence),
        }))
    }

    fn batches(&self) -> Option<usize> {
        self.options.batches_per_epoch
    }

    fn identity(&self) -> Identity {
        self.identity.clone()
    }

    fn bounds(&self) -> Bounds {
        let StreamOptions { interleave, rank, world_size, shuffle_buffer, batches_per_epoch, .. } = self.options;
        Bounds {
            batches: batches_per_epoch,
            lanes: Some(LaneBounds {
                all: interleave,
                own: (rank..interleave).step_by(world_size).collect(),
                window: shuffle_buffer,
                repeat: batches_per_epoch.is_some(),
            }),
            generator: false,
        }
    }
}

struct StreamEpoch<D: IterableDataset, C, B> {
    dataset: Arc<D>,
    stages: Arc<Stages<C, B>>,
    options: StreamOptions,
    plan: LanePlan,
    epoch: u64,
    delivered: BTreeSet<usize>,
    /// Read by one thread at a time, so that the order does not depend on the number of threads. The slow work,
    /// decoding and collating, is done outside the lock.
    sequence: Mutex<Sequence<D>>,
    /// Notified when a batch is finished: only then is it known whether it was empty, and so whether the epoch needs
    /// one more.
    settled: Condvar,
}

/// The samples of this rank in order: the lanes take turns.
struct Sequence<D: IterableDataset> {
    lanes: Vec<(usize, Lane<Arc<D>>)>,
    turn: usize,
    /// The lane that was read last.
    reading: usize,
    /// The number of the next batch.
    next: usize,
    /// The number at which the epoch ends: one more for each batch that lost all samples, so that every rank delivers
    /// the requested number of batches.
    limit: Option<usize>,
    /// How many batches are being made: each may still turn out to be empty.
    making: usize,
    /// How many batches in a row have lost all samples.
    empty_in_a_row: usize,
    /// Whether this epoch continues a pass that an earlier epoch broke off, and has not made a batch yet.
    rest: bool,
    ended: bool,
}

impl<D: IterableDataset> Sequence<D> {
    fn draw(&mut self, cancelled: &Cancellation) -> Option<Item<D::Sample>> {
        for _ in 0..self.lanes.len() {
            self.reading = self.turn;
            self.turn = (self.turn + 1) % self.lanes.len();
            if let Some(item) = self.lanes[self.reading].1.next(cancelled) {
                return Some(item);
            }
        }
        None
    }

    /// Moves every lane to the start of a pass.
    fn begin_anew(&mut self, dataset: &Arc<D>, plan: LanePlan, pass: u64) {
        for (number, lane) in &mut self.lanes {
            *lane = Lane::at(dataset.clone(), plan, *number, LanePosition::start_of(pass));
        }
        (self.turn, self.reading) = (0, 0);
    }

    /// The item that was being read when the stream panicked.
    fn origin(&self) -> Option<Origin> {
        let (_, lane) = self.lanes.get(self.reading)?;
        let pass = lane.position().pass;
        lane.place().map(|(shard, position)| Origin { shard, position, pass, key: None })
    }

    fn mark(&self) -> Mark {
        let lanes = self.lanes.iter().map(|(number, lane)| (*number, lane.position())).collect();
        Some(Box::new(StreamMark { turn: self.turn, lanes }))
    }
}

/// The samples of one batch as they were read, before decoding and collating.
struct Cut<S> {
    number: usize,
    samples: Vec<(Origin, Deferred<S>)>,
    faults: Vec<Fault>,
    /// The error that ends the epoch after these samples.
    error: Option<DataError>,
    mark: Mark,
    read: Duration,
}

impl<D, C> EpochWork<C::Batch> for StreamEpoch<D, C, C::Batch>
where
    D: IterableDataset,
    C: Collate<D::Sample>,
{
    fn make(&self, cancelled: &Cancellation) -> Option<Made<C::Batch>> {
        let cut = self.cut(cancelled)?;
        let (number, mark) = (cut.number, cut.mark.clone());
        let mut making = Making { epoch: self, is_empty: None };
        if self.delivered.contains(&number) {
            return Some(Made { number, result: Ok(Content::Delivered), mark });
        }
        let result = match self.assemble(cut, cancelled) {
            Err(DataError::Cancelled) if cancelled.is_cancelled() => return None,
            result => result,
        };
        making.is_empty = Some(matches!(result, Ok(Content::Later)));
        let result = match self.options.batches_per_epoch {
            Some(batches) if making.settle() => Err(DataError::StreamEnded { batch: number, batches }),
            _ => result,
        };
        Some(Made { number, result, mark })
    }
}

/// A batch that is being made. At the epoch's end, other threads wait until it is known whether the batch is empty.
struct Making<'a, D: IterableDataset, C, B> {
    epoch: &'a StreamEpoch<D, C, B>,
    /// Whether it lost all samples; `None` where that is not known.
    is_empty: Option<bool>,
}

impl<D: IterableDataset, C, B> Making<'_, D, C, B> {
    /// Records whether the batch was empty; true when so many in a row were empty that the epoch has to end.
    fn settle(&mut self) -> bool {
        let Some(is_empty) = self.is_empty.take() else { return false };
        let mut sequence = self.epoch.sequence();
        sequence.empty_in_a_row = if is_empty { sequence.empty_in_a_row + 1 } else { 0 };
        sequence.limit = sequence.limit.map(|limit| limit.saturating_add(usize::from(is_empty)));
        sequence.ended |= sequence.empty_in_a_row >= MAX_EMPTY_BATCHES;
        sequence.empty_in_a_row >= MAX_EMPTY_BATCHES
    }
}

impl<D: IterableDataset, C, B> Drop for Making<'_, D, C, B> {
    fn drop(&mut self) {
        self.epoch.sequence().making -= 1;
        self.epoch.settled.notify_all();
    }
}

impl<D: IterableDataset, C, B> StreamEpoch<D, C, B> {
    fn sequence(&self) -> MutexGuard<'_, Sequence<D>> {
        self.sequence.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Locks the sequence when the next batch can be taken out of it; `None` at the end, or when cancelled.
    fn due(&self, cancelled: &Cancellation) -> Option<MutexGuard<'_, Sequence<D>>> {
        let mut sequence = self.sequence();
        // Cancellation is checked first: a thread that was cancelled while it held the lock leaves the sequence in the
        // middle of a batch.
        while !cancelled.is_cancelled() && !sequence.ended {
            if sequence.limit.is_none_or(|limit| sequence.next < limit) {
                return Some(sequence);
            }
            if sequence.making == 0 {
                return None;
            }
            // The threads that make batches notify when they are done, even if they were cancelled.
            sequence = self.settled.wait(sequence).unwrap_or_else(PoisonError::into_inner);
        }
        None
    }
}

impl<D, C> StreamEpoch<D, C, C::Batch>
where
    D: IterableDataset,
    C: Collate<D::Sample>,
{
    /// Takes the next batch's samples out of the stream.
    fn cut(&self, cancelled: &Cancellation) -> Option<Cut<D::Sample>> {
        let mut sequence = self.due(cancelled)?;
        let begun = Instant::now();
        let number = sequence.next;
        let (mut samples, mut faults) = (Vec::with_capacity(self.options.batch_size.min(1 << 16)), Vec::new());
        let place = Cell::new(Place::Collate);
        let read = guarded(
            number,
            &place,
            |_| None,
            || {
                while samples.len() < self.options.batch_size {
                    let item = sequence.draw(cancelled);
                    cancelled.check()?;
                    let Some(Item { pass, shard, position, sample }) = item else {
                        if !(std::mem::take(&mut sequence.rest) && (samples.is_empty() || self.options.drop_last)) {
                            sequence.ended = true;
                            break;
                        }
                        // What the earlier epoch left is nothing, or with `drop_last` less than a batch: begin this
                        // epoch's own pass.
                        samples.clear();
                        sequence.begin_anew(&self.dataset, self.plan, self.epoch);
                        continue;
                    };
                    let mut origin = Origin { shard, position, pass, key: None };
                    match sample {
                        Ok(mut sample) => {
                            origin.key = sample.take_key();
                            samples.push((origin, sample));
                        }
                        Err(error) => {
                            let error = origin.error(&*self.dataset, error);
                            if self.stages.on_error == OnError::Fail {
                                return Err(error);
                            }
                            faults.push(Fault::of_item(self.epoch, origin.index(), &error));
                            if faults.len() == MOST_FAULTS {
                                self.stages.report(faults.drain(..));
                            }
                        }
                    }
                }
                Ok(())
            },
        );
        let mut error = match read {
            Err(DataError::Cancelled) if cancelled.is_cancelled() => return None,
            Err(DataError::CollatePanicked { batch, message }) => {
                let panicked = DataError::StreamPanicked { batch, message };
                Some(match sequence.origin() {
                    Some(origin) => origin.error(&*self.dataset, panicked),
                    None => panicked,
                })
            }
            read => read.err(),
        };
        if cancelled.is_cancelled() {
            return None;
        }
        if let (Some(batches), true, None) = (self.options.batches_per_epoch, samples.is_empty(), &error) {
            error = Some(DataError::StreamEnded { batch: number, batches });
        }
        sequence.ended |= error.is_some();
        let short = samples.len() < self.options.batch_size;
        if error.is_none() && (samples.is_empty() || (short && self.options.drop_last)) {
            self.stages.report(faults.into_iter());
            return None;
        }
        (sequence.next, sequence.making, sequence.rest) = (number + 1, sequence.making + 1, false);
        Some(Cut { number, samples, faults, error, mark: sequence.mark(), read: begun.elapsed() })
    }

    fn assemble(&self, cut: Cut<D::Sample>, cancelled: &Cancellation) -> Result<Content<C::Batch>, DataError> {
        let Cut { number, samples, faults, error, read, .. } = cut;
        if let Some(error) = error {
            self.stages.report(faults.into_iter());
            return Err(error);
        }
        let place = Cell::new(Place::Collate);
        let mut queue = Queue {
            dataset: &*self.dataset,
            len: samples.len(),
            drawn: Vec::with_capacity(samples.len()),
            samples: samples.into_iter(),
            epoch: self.epoch,
            on_error: self.stages.on_error,
            cancelled,
            place: &place,
            faults,
            rejectable: false,
            rejected: 0,
        };
        let result = guarded(
            number,
            &place,
            |_| None,
            || {
                let mut samples = BatchSamples::new(&mut queue, self.epoch, number, self.stages.pinned);
                samples.spent(Stage::Read, read);
                self.stages.collate(&mut samples)
            },
        );
        self.stages.report(std::mem::take(&mut queue.faults).into_iter());
        match result {
            Ok((batch, counted)) => guarded(
                number,
                &place,
                |_| None,
                || {
                    let (batch, uploaded) = self.stages.send(batch)?;
                    Ok(Content::Batch { batch, samples: counted.unwrap_or(queue.drawn.len()), uploaded })
                },
            ),
            Err(DataError::EmptyBatch) if queue.rejected > 0 => match self.options.batches_per_epoch {
                Some(_) => Ok(Content::Later),
                None => Ok(Content::Nothing),
            },
            Err(error) => Err(queue.named(error)),
        }
    }
}

/// Faults are reported at the end of a batch, or when this many have gathered: a stream may consist of bad items only.
const MOST_FAULTS: usize = 1000;

/// The epoch ends after this many batches in a row have lost all samples: by then hardly any sample is good.
const MAX_EMPTY_BATCHES: usize = 256;
