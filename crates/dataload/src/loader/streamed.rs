//! Batches of a stream.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::batch_samples::Stage;
use crate::loader::fault::{Fault, OnError};
use crate::loader::guard::{Place, guarded};
use crate::loader::lane::{Item, Lane, LanePlan};
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
    fn begin(&self, position: &Position) -> Result<Arc<dyn EpochWork<C::Batch>>, DataError> {
        let StreamOptions { interleave, rank, world_size, .. } = self.options;
        let plan = LanePlan {
            seed: self.identity.seed,
            epoch: position.epoch,
            lanes: interleave,
            shuffle: self.options.shuffle,
            window: self.options.shuffle_buffer,
            repeat: self.options.batches_per_epoch.is_some(),
        };
        let mark = position.mark.as_deref();
        let mut lanes = BTreeMap::new();
        for number in (rank..interleave).step_by(world_size) {
            let from = match mark {
                None => Default::default(),
                Some(mark) => *mark.lanes.get(&number).ok_or_else(|| {
                    let expected = format!("the states of all ranks put together: lane {number} is missing");
                    DataError::option("state", expected, "the state of another rank")
                })?,
            };
            lanes.insert(number, Lane::at(self.dataset.clone(), plan, number, from));
        }
        let delivered = position.before.clone();
        let turn = mark.map_or(0, |mark| mark.turn) % lanes.len().max(1);
        let lanes = lanes.into_iter().collect();
        let sequence = Sequence { lanes, turn, reading: turn, next: position.batch, ended: false };
        Ok(Arc::new(StreamEpoch {
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
        }
    }
}

struct StreamEpoch<D: IterableDataset, C, B> {
    dataset: Arc<D>,
    stages: Arc<Stages<C, B>>,
    options: StreamOptions,
    epoch: u64,
    delivered: BTreeSet<usize>,
    /// Read by one thread at a time, so that the order does not depend on their number. What takes long, decoding and
    /// collating, is done outside.
    sequence: Mutex<Sequence<D>>,
}

/// The samples of this rank in order: the lanes take turns.
struct Sequence<D: IterableDataset> {
    lanes: Vec<(usize, Lane<Arc<D>>)>,
    turn: usize,
    /// The lane that had the last turn.
    reading: usize,
    /// The number of the next batch.
    next: usize,
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

    /// What was being read when the stream panicked.
    fn origin(&self) -> Option<Origin> {
        let (_, lane) = self.lanes.get(self.reading)?;
        lane.place().map(|(shard, position)| Origin { shard, position, key: None })
    }

    fn mark(&self) -> Mark {
        let lanes = self.lanes.iter().map(|(number, lane)| (*number, lane.position())).collect();
        Some(Box::new(StreamMark { turn: self.turn, lanes }))
    }
}

/// The raw samples of one batch.
struct Cut<S> {
    number: usize,
    samples: Vec<(Origin, Deferred<S>)>,
    faults: Vec<Fault>,
    /// What ends the epoch after these samples.
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
        if self.delivered.contains(&number) {
            return Some(Made { number, result: Ok(Content::Delivered), mark });
        }
        let result = match self.assemble(cut, cancelled) {
            Err(DataError::Cancelled) if cancelled.is_cancelled() => return None,
            result => result,
        };
        Some(Made { number, result, mark })
    }
}

impl<D, C> StreamEpoch<D, C, C::Batch>
where
    D: IterableDataset,
    C: Collate<D::Sample>,
{
    /// Takes the next batch's samples out of the stream.
    fn cut(&self, cancelled: &Cancellation) -> Option<Cut<D::Sample>> {
        let mut sequence = self.sequence.lock().unwrap_or_else(PoisonError::into_inner);
        // Beyond the last one only for a state that somebody has changed: the stream itself may have no end.
        let complete = self.options.batches_per_epoch.is_some_and(|batches| sequence.next >= batches);
        // Whoever held the lock before may have stopped in the middle.
        if cancelled.is_cancelled() || sequence.ended || complete {
            return None;
        }
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
                    let Some(Item { shard, position, sample }) = item else {
                        sequence.ended = true;
                        break;
                    };
                    let mut origin = Origin { shard, position, key: None };
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
        sequence.next += 1;
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
            Err(DataError::EmptyBatch) if queue.rejected > 0 => Ok(Content::Nothing),
            Err(error) => Err(queue.named(error)),
        }
    }
}

/// Faults are reported at the end of a batch, or when there are so many: a stream may be nothing else.
const MOST_FAULTS: usize = 1000;
