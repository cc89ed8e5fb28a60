//! Batches of a stream.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::{Duration, Instant};

use crate::batch_samples::{Stage, StageTimes};
use crate::loader::ahead::{Cursor, Lanes, Next};
use crate::loader::fault::{Fault, OnError};
use crate::loader::guard::{Place, guarded};
use crate::loader::lane::{Item, LanePlan, LanePosition};
use crate::loader::lock;
use crate::loader::numbering::{Numbering, Turn};
use crate::loader::position::{Bounds, Identity, LaneBounds, Mark, Position};
use crate::loader::shared::SharedBatch;
use crate::loader::stages::{Collated, Stages};
use crate::loader::stream_feed::{Origin, Sample, StreamFeed};
use crate::loader::work::{BatchSource, EpochWork, Made, Outcome};
use crate::{BatchSamples, Cancellation, Collate, DataError, Drawn, IterableDataset};

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
    /// The most bytes that the raw samples of a batch may take.
    pub(crate) batch_bytes: usize,
    pub(crate) interleave: usize,
    pub(crate) rank: usize,
    pub(crate) world_size: usize,
    pub(crate) batches_per_epoch: Option<usize>,
}

impl<D, C> BatchSource<C::Batch> for Streamed<D, C>
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
        let mut positions = Vec::new();
        for number in (rank..interleave).step_by(world_size) {
            let from = match mark {
                None => LanePosition::start_of(position.epoch),
                Some(mark) => *mark.lanes.get(&number).ok_or_else(|| {
                    let expected = format!("the merged states of all ranks (lane {number} is missing)");
                    DataError::option("state", expected, "the state of another rank")
                })?,
            };
            positions.push((number, from));
        }
        let turn = mark.map_or(0, |mark| mark.turn);
        let (lanes, cursor) = Lanes::new(self.dataset.clone(), plan, turn, positions, self.options.batch_size);
        let limit = self.options.batches_per_epoch.map(|batches| batches.saturating_add(position.extra));
        let rest = !plan.repeat && mark.is_some() && position.batch == 0;
        Ok(Arc::new(StreamEpoch {
            dataset: self.dataset.clone(),
            stages: self.stages.clone(),
            options: self.options,
            epoch: position.epoch,
            delivered: position.before.clone(),
            lanes,
            cursor: Mutex::new(cursor),
            numbering: Numbering::new(position.batch, limit, rest),
            begin: position.batch,
            workers: AtomicUsize::new(1),
            first: OnceLock::new(),
        }))
    }

    fn batches(&self, _position: &Position) -> Option<usize> {
        self.options.batches_per_epoch
    }

    fn identity(&self) -> Identity {
        self.identity.clone()
    }

    fn bounds(&self) -> Bounds {
        let StreamOptions { interleave, rank, world_size, shuffle_buffer, batches_per_epoch, .. } = self.options;
        Bounds {
            batches: batches_per_epoch,
            ranks: None,
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
    epoch: u64,
    delivered: BTreeSet<usize>,
    lanes: Lanes<D>,
    /// Used by the thread that cuts a batch: one at a time, so that the order does not depend on the number of threads.
    /// The slow work is done by all of them: decoding and collating, and reading ahead.
    cursor: Mutex<Cursor>,
    numbering: Numbering,
    /// The number of the first batch.
    begin: usize,
    workers: AtomicUsize,
    /// The first batch, whose samples several workers make.
    first: OnceLock<First<D::Sample>>,
}

/// The samples of one batch as they were read, before decoding and collating.
struct Cut<S> {
    number: usize,
    samples: Vec<(Origin, Sample<S>)>,
    /// The bytes of the samples as they were read.
    raw: usize,
    faults: Vec<Fault>,
    /// The error that ends the epoch after these samples.
    error: Option<DataError>,
    mark: Mark,
    read: Duration,
}

/// The first batch of an epoch: all workers would wait for it otherwise.
struct First<S> {
    /// Each sample, and the number of its draw.
    batch: SharedBatch<(u64, Sample<S>), S>,
    /// The samples' origins and the rest of the batch, until its samples are made.
    rest: Mutex<Option<(Vec<Origin>, Cut<S>)>>,
}

impl<S> First<S> {
    fn new(mut cut: Cut<S>) -> Self {
        let part = |(origin, sample): (Origin, Sample<S>)| {
            let draw = Drawn::new((), origin.index(), origin.pass).draw();
            (origin, (draw, sample))
        };
        let (origins, samples) = std::mem::take(&mut cut.samples).into_iter().map(part).unzip();
        Self { batch: SharedBatch::new(cut.number, samples), rest: Mutex::new(Some((origins, cut))) }
    }
}

impl<D, C> EpochWork<C::Batch> for StreamEpoch<D, C, C::Batch>
where
    D: IterableDataset,
    C: Collate<D::Sample>,
{
    fn make(&self, cancelled: &Cancellation) -> Option<Made<C::Batch>> {
        let cut = self.due(cancelled)?;
        let (number, mark) = (cut.number, cut.mark.clone());
        let making = Making(&self.numbering);
        if self.delivered.contains(&number) {
            return Some(Made::new(number, Ok(Outcome::Delivered), mark));
        }
        let result = match self.assemble(cut, cancelled) {
            Err(DataError::Cancelled) if cancelled.is_cancelled() => return None,
            result => result,
        };
        if matches!(result, Ok(Outcome::Later)) {
            making.0.one_more();
        }
        Some(Made::new(number, result, mark))
    }

    fn shared_by(&self, workers: usize) {
        self.workers.store(workers, Relaxed);
    }
}

/// A batch that is being made. At the epoch's end, other threads wait until it is known whether the batch is empty.
struct Making<'a>(&'a Numbering);

impl Drop for Making<'_> {
    fn drop(&mut self) {
        self.0.finished();
    }
}

impl<D, C> StreamEpoch<D, C, C::Batch>
where
    D: IterableDataset,
    C: Collate<D::Sample>,
{
    /// The samples of the batch that this thread makes, after it has helped with the first batch.
    fn due(&self, cancelled: &Cancellation) -> Option<Cut<D::Sample>> {
        loop {
            if let Some(first) = self.help(cancelled) {
                return Some(first);
            }
            let Some(mut turn) = self.numbering.due(cancelled, || self.read_ahead(cancelled)) else {
                return self.help(cancelled);
            };
            if self.first.get().is_some_and(|first| first.batch.needs_help()) {
                continue;
            }
            let cut = self.cut(&mut turn, cancelled)?;
            let is_first = cut.number == self.begin && !self.delivered.contains(&cut.number);
            if !is_first || cut.samples.len() < 2 || cut.error.is_some() || self.workers.load(Relaxed) < 2 {
                return Some(cut);
            }
            _ = self.first.set(First::new(cut));
        }
    }

    /// Makes samples of the first batch with the other workers; the batch where this one makes it.
    fn help(&self, cancelled: &Cancellation) -> Option<Cut<D::Sample>> {
        let First { batch, rest } = self.first.get()?;
        let is_last = batch.help(&self.stages, self.epoch, cancelled, |(draw, sample)| Ok((sample.get()?.0, draw)));
        let (origins, cut) = is_last.then(|| lock(rest).take()).flatten()?;
        let samples = origins.into_iter().zip(batch.take_all().map(|made| Sample::Made(Box::new(made)))).collect();
        Some(Cut { samples, ..cut })
    }

    /// Takes the next batch's samples out of the stream.
    fn cut(&self, turn: &mut Turn<'_>, cancelled: &Cancellation) -> Option<Cut<D::Sample>> {
        let mut cursor = lock(&self.cursor);
        let (begun, number) = (Instant::now(), turn.number);
        let samples = Vec::with_capacity(self.options.batch_size.min(1 << 16));
        let mut cut =
            Cut { number, samples, raw: 0, faults: Vec::new(), error: None, mark: None, read: Duration::ZERO };
        let place = Cell::new(Place::Collate);
        let read = guarded(number, &place, |_| None, || self.draw(turn, &mut cursor, &mut cut, cancelled));
        cut.error = match read {
            Err(DataError::Cancelled) if cancelled.is_cancelled() => return None,
            Err(DataError::CollatePanicked { batch, message } | DataError::StreamPanicked { batch, message }) => {
                let panicked = DataError::StreamPanicked { batch, message };
                Some(match self.lanes.origin(&cursor) {
                    Some(origin) => origin.error(&*self.dataset, panicked),
                    None => panicked,
                })
            }
            read => read.err(),
        };
        if cancelled.is_cancelled() {
            return None;
        }
        let short = cut.samples.len() < self.options.batch_size;
        let is_none = cut.samples.is_empty() || (short && self.options.drop_last);
        if let (Some(batches), true, None) = (self.options.batches_per_epoch, is_none, &cut.error) {
            cut.error = Some(DataError::StreamEnded { batch: number, batches });
        }
        turn.ended |= cut.error.is_some();
        if cut.error.is_none() && is_none {
            if number == 0 {
                // Not an error, but seldom meant: a `select` of files that no sample has, or a filter that keeps nothing.
                tracing::warn!(epoch = self.epoch, samples = cut.samples.len(), "the stream has not given a batch");
            }
            self.stages.report(cut.faults.into_iter());
            return None;
        }
        turn.cut();
        (cut.mark, cut.read) = (self.lanes.mark(&cursor), begun.elapsed());
        Some(cut)
    }

    /// Reads an item ahead, where there is room for one.
    fn read_ahead(&self, cancelled: &Cancellation) -> bool {
        let begun = Instant::now();
        let read = self.lanes.read_ahead(cancelled);
        self.stages.counters.worked(StageTimes::of(Stage::Read, begun.elapsed()));
        read
    }

    /// Draws the samples of a batch.
    fn draw(
        &self,
        turn: &mut Turn<'_>,
        cursor: &mut Cursor,
        cut: &mut Cut<D::Sample>,
        cancelled: &Cancellation,
    ) -> Result<(), DataError> {
        let Cut { samples, raw: bytes, faults, .. } = cut;
        while samples.len() < self.options.batch_size {
            let next = self.lanes.draw(cursor, cancelled);
            cancelled.check()?;
            let Item { pass, shard, position, sample } = match next {
                Some(Next::Item(item)) => item,
                Some(Next::Panicked(message)) => {
                    return Err(DataError::StreamPanicked { batch: turn.number, message });
                }
                None if std::mem::take(&mut turn.rest) && (samples.is_empty() || self.options.drop_last) => {
                    // What the earlier epoch left is nothing, or with `drop_last` less than a batch: begin this epoch's
                    // own pass.
                    samples.clear();
                    *bytes = 0;
                    self.lanes.begin_anew(cursor, self.epoch);
                    continue;
                }
                None => {
                    // With `batches_per_epoch`, it is an error that a batch is missing, which the next cut finds.
                    turn.ended = self.options.batches_per_epoch.is_none();
                    break;
                }
            };
            let mut origin = Origin { shard, position, pass, key: None };
            let sample = sample.map(|mut sample| {
                origin.key = sample.take_key();
                *bytes = bytes.saturating_add(sample.bytes());
                sample
            });
            match sample {
                Ok(_) if *bytes > self.options.batch_bytes => {
                    let expected = format!("room for a batch, at least {bytes} bytes for {}", samples.len() + 1);
                    let error = DataError::option("memory_budget", expected, self.options.batch_bytes);
                    return Err(origin.error(&*self.dataset, error));
                }
                Ok(sample) => samples.push((origin, Sample::Raw(sample))),
                Err(error) => {
                    let error = origin.error(&*self.dataset, error);
                    if self.stages.on_error == OnError::Fail || error.ends_epoch() {
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
    }

    fn assemble(&self, cut: Cut<D::Sample>, cancelled: &Cancellation) -> Result<Outcome<C::Batch>, DataError> {
        let Cut { number, samples, raw, faults, error, read, .. } = cut;
        if let Some(error) = error {
            self.stages.report(faults.into_iter());
            return Err(error);
        }
        let place = Cell::new(Place::Collate);
        let mut feed = StreamFeed {
            dataset: &*self.dataset,
            len: samples.len(),
            drawn: Vec::with_capacity(samples.len()),
            samples: samples.into_iter(),
            prepared: None,
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
                let mut samples = BatchSamples::new(&mut feed, self.epoch, number, self.stages.pinned);
                samples.spent(Stage::Read, read);
                self.stages.collate(&mut samples)
            },
        );
        self.stages.report(std::mem::take(&mut feed.faults).into_iter());
        match result {
            Ok(Collated { batch, counted, .. }) => guarded(
                number,
                &place,
                |_| None,
                || {
                    let (batch, uploaded) = self.stages.send(batch)?;
                    Ok(Outcome::Batch { batch, samples: counted.unwrap_or(feed.drawn.len()), raw, uploaded })
                },
            ),
            Err(DataError::EmptyBatch) if feed.rejected > 0 => match self.options.batches_per_epoch {
                Some(_) => Ok(Outcome::Later),
                None => Ok(Outcome::Nothing),
            },
            Err(error) => Err(feed.named(error)),
        }
    }
}

/// Faults are reported at the end of a batch, or when this many have gathered: a stream may consist of bad items only.
const MOST_FAULTS: usize = 1000;
