//! Batches of a stream.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::batch_samples::{Draw, Stage};
use crate::loader::fault::{Fault, OnError};
use crate::loader::guard::{Place, guarded};
use crate::loader::lane::{Item, Lane, LanePlan};
use crate::loader::position::{Bounds, Identity, LaneBounds, Mark, Position, StreamMark};
use crate::loader::stages::Stages;
use crate::loader::work::{Content, EpochWork, Made, Source};
use crate::{BatchSamples, Collate, DataError, Deferred, Drawn, IterableDataset};

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
        let sequence = Sequence { lanes: lanes.into_iter().collect(), turn, next: position.batch, ended: false };
        Ok(Arc::new(StreamEpoch {
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
    /// The number of the next batch.
    next: usize,
    ended: bool,
}

impl<D: IterableDataset> Sequence<D> {
    fn draw(&mut self, cancelled: &AtomicBool) -> Option<Item<D::Sample>> {
        for _ in 0..self.lanes.len() {
            let turn = self.turn;
            self.turn = (turn + 1) % self.lanes.len();
            if let Some(item) = self.lanes[turn].1.next(cancelled) {
                return Some(item);
            }
        }
        None
    }

    fn mark(&self) -> Mark {
        let lanes = self.lanes.iter().map(|(number, lane)| (*number, lane.position())).collect();
        Some(Box::new(StreamMark { turn: self.turn, lanes }))
    }
}

/// The raw samples of one batch.
struct Cut<S> {
    number: usize,
    samples: Vec<Drawn<Deferred<S>>>,
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
    fn make(&self, cancelled: &AtomicBool) -> Option<Made<C::Batch>> {
        let cut = self.cut(cancelled)?;
        let (number, mark) = (cut.number, cut.mark.clone());
        if self.delivered.contains(&number) {
            return Some(Made { number, result: Ok(Content::Delivered), mark });
        }
        let result = match self.assemble(cut, cancelled) {
            Err(DataError::Cancelled) if cancelled.load(Relaxed) => return None,
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
    fn cut(&self, cancelled: &AtomicBool) -> Option<Cut<D::Sample>> {
        let mut sequence = self.sequence.lock().unwrap_or_else(PoisonError::into_inner);
        // Beyond the last one only for a state that somebody has changed: the stream itself may have no end.
        let complete = self.options.batches_per_epoch.is_some_and(|batches| sequence.next >= batches);
        // Whoever held the lock before may have stopped in the middle.
        if cancelled.load(Relaxed) || sequence.ended || complete {
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
                    if cancelled.load(Relaxed) {
                        return Err(DataError::Cancelled);
                    }
                    let Some(Item { shard, position, sample }) = sequence.draw(cancelled) else {
                        sequence.ended = true;
                        break;
                    };
                    let index = index_of(shard, position);
                    match sample {
                        Ok(sample) => samples.push(Drawn { sample, index }),
                        Err(error) => {
                            let error = DataError::StreamItem { shard, position, error: Box::new(error) };
                            if self.stages.on_error == OnError::Fail {
                                return Err(error);
                            }
                            faults.push(Fault::new(self.epoch, index, None, &error));
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
            Err(DataError::Cancelled) if cancelled.load(Relaxed) => return None,
            Err(DataError::CollatePanicked { batch, message }) => Some(DataError::StreamPanicked { batch, message }),
            read => read.err(),
        };
        if cancelled.load(Relaxed) {
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

    fn assemble(&self, cut: Cut<D::Sample>, cancelled: &AtomicBool) -> Result<Content<C::Batch>, DataError> {
        let Cut { number, samples, mut faults, error, read, .. } = cut;
        if let Some(error) = error {
            self.stages.report(faults.into_iter());
            return Err(error);
        }
        let place = Cell::new(Place::Collate);
        let mut rejected = 0;
        let mut queue = Queue {
            len: samples.len(),
            samples: samples.into_iter(),
            last: None,
            epoch: self.epoch,
            on_error: self.stages.on_error,
            cancelled,
            place: &place,
            faults: &mut faults,
            drawn: 0,
            rejected: &mut rejected,
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
        let drawn = queue.drawn;
        self.stages.report(faults.into_iter());
        match result {
            Ok((batch, counted)) => guarded(
                number,
                &place,
                |_| None,
                || {
                    let (batch, uploaded) = self.stages.send(batch)?;
                    Ok(Content::Batch { batch, samples: counted.unwrap_or(drawn), uploaded })
                },
            ),
            Err(DataError::EmptyBatch) if rejected > 0 => Ok(Content::Nothing),
            Err(DataError::WorkerPanicked { index, message, .. }) => {
                let (shard, position) = place_of(index as u64);
                let error = Box::new(DataError::other(format!("panicked: {message}")));
                Err(DataError::StreamItem { shard, position, error })
            }
            Err(error) => Err(error),
        }
    }
}

/// Faults are reported at the end of a batch, or when there are so many: a stream may be nothing else.
const MOST_FAULTS: usize = 1000;

/// Where the position begins in the number that stands for an item.
const POSITION_BITS: u32 = 40;

/// One number for an item of a stream.
fn index_of(shard: usize, position: u64) -> u64 {
    (shard as u64) << POSITION_BITS | position
}

fn place_of(index: u64) -> (usize, u64) {
    ((index >> POSITION_BITS) as usize, index & ((1 << POSITION_BITS) - 1))
}

/// Gives the samples of one batch that have been read.
struct Queue<'a, S> {
    len: usize,
    samples: std::vec::IntoIter<Drawn<Deferred<S>>>,
    last: Option<u64>,
    epoch: u64,
    on_error: OnError,
    cancelled: &'a AtomicBool,
    place: &'a Cell<Place>,
    faults: &'a mut Vec<Fault>,
    drawn: usize,
    rejected: &'a mut usize,
}

impl<S> Draw<S> for Queue<'_, S> {
    fn len(&self) -> usize {
        self.len
    }

    fn draw(&mut self) -> Result<Option<Drawn<S>>, DataError> {
        loop {
            if self.cancelled.load(Relaxed) {
                return Err(DataError::Cancelled);
            }
            let Some(Drawn { sample, index }) = self.samples.next() else { return Ok(None) };
            self.drawn += 1;
            self.last = Some(index);
            self.place.set(Place::Sample(index));
            match sample.get() {
                Ok(sample) => return Ok(Some(Drawn { sample, index })),
                Err(error) => self.reject(error)?,
            }
        }
    }

    fn reject(&mut self, error: DataError) -> Result<(), DataError> {
        let Some(index) = self.last.take() else { return Err(error) };
        let (shard, position) = place_of(index);
        let error = DataError::StreamItem { shard, position, error: Box::new(error) };
        if self.on_error == OnError::Fail {
            return Err(error);
        }
        self.drawn -= 1;
        *self.rejected += 1;
        self.faults.push(Fault::new(self.epoch, index, None, &error));
        Ok(())
    }

    fn complete(&mut self) {
        self.place.set(Place::Collate);
    }
}
