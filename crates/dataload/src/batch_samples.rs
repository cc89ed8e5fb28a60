//! The samples that a collate function reads for one batch.

use std::any::Any;
use std::time::{Duration, Instant};

use crate::loader::draw;
use crate::{Cancellation, DataError};

/// The samples of one batch, each read when it is asked for.
///
/// A collate function calls [`reject`](Self::reject) for a bad sample: the loader's [`OnError`](crate::OnError) then
/// decides whether the epoch ends, the batch gets smaller, or a substitute follows.
pub struct BatchSamples<'a, S> {
    source: &'a mut dyn Feed<S>,
    epoch: u64,
    batch: usize,
    pinned: bool,
    times: StageTimes,
    counted: Option<usize>,
    raw: usize,
}

/// A sample with its position in the data.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Drawn<S> {
    /// The sample.
    pub sample: S,
    /// The sample's index in its dataset; in a stream, a number that encodes the shard and the position in it.
    pub index: u64,
    /// Its position in the epoch's order of all ranks; in a stream, the number of the pass over the shards.
    at: u64,
}

impl<S> Drawn<S> {
    pub(crate) fn new(sample: S, index: u64, at: u64) -> Self {
        Self { sample, index, at }
    }

    /// A number for this draw of the sample. Seed random augmentation with it and [`BatchSamples::epoch`]: then a
    /// sample that is drawn twice in an epoch, or on another rank, is augmented differently.
    ///
    /// It depends on the index and on the position in the epoch's order of all ranks; in a stream, on the index and the
    /// number of the pass. It does not depend on the workers, on resuming, or, at the same global batch, on the number
    /// of ranks.
    pub fn draw(&self) -> u64 {
        draw(self.index, self.at)
    }
}

/// A part of the work on a batch, for [`LoaderStats`](crate::LoaderStats).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Stage {
    /// `Dataset::get`, or the reading of a stream.
    Read,
    /// From encoded bytes to pixels.
    Decode,
    /// Augmentation and resizing.
    Transform,
    /// The rest of the collate function.
    Collate,
    /// Pinning, and starting the copy to the device.
    Transfer,
}

/// Time spent by stage.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct StageTimes(pub(crate) [Duration; 5]);

impl StageTimes {
    pub(crate) fn of(stage: Stage, time: Duration) -> Self {
        let mut times = Self::default();
        times.add(stage, time);
        times
    }

    pub(crate) fn add(&mut self, stage: Stage, time: Duration) {
        self.0[stage as usize] += time;
    }

    pub(crate) fn total(&self) -> Duration {
        self.0.iter().sum()
    }
}

/// What a collate function has made of one sample alone, see [`Collate::prepare`](crate::Collate).
pub struct Prepared(pub(crate) Box<dyn Any + Send>);

/// The source of a batch's samples.
pub(crate) trait Feed<S> {
    /// How many samples the batch has as long as none is bad.
    fn len(&self) -> usize;
    /// How much memory a sample takes, where that is known.
    fn bytes(&self, _sample: &S) -> usize {
        0
    }
    /// The next good sample.
    fn draw(&mut self) -> Result<Option<Drawn<S>>, DataError>;
    /// What the collate function has made of the sample drawn last.
    fn prepared(&mut self) -> Option<Prepared> {
        None
    }
    /// The indices of all remaining samples, which need not be read.
    fn indices(&mut self) -> Result<Vec<u64>, DataError> {
        let mut indices = Vec::with_capacity(self.len());
        while let Some(drawn) = self.draw()? {
            indices.push(drawn.index);
        }
        Ok(indices)
    }
    /// Applies the fault policy to the sample drawn last.
    fn reject(&mut self, error: DataError) -> Result<(), DataError>;
    /// Whether the batch is still wanted.
    fn cancelled(&self) -> Cancellation {
        Cancellation::default()
    }
    /// Marks that all samples are drawn: a later error is about the whole batch.
    fn complete(&mut self);
}

impl<'a, S> BatchSamples<'a, S> {
    pub(crate) fn new(source: &'a mut dyn Feed<S>, epoch: u64, batch: usize, pinned: bool) -> Self {
        Self { source, epoch, batch, pinned, times: StageTimes::default(), counted: None, raw: 0 }
    }

    /// How many samples the batch has as long as none is bad.
    pub fn len(&self) -> usize {
        self.source.len()
    }

    /// Whether the batch has no sample at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The epoch's number.
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The batch's number in its epoch, the same on every rank. Seed what is random about a whole batch with it and
    /// [`epoch`](Self::epoch), and also with [`Drawn::draw`] of the first sample where ranks should differ.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Whether the batch is wanted in pinned (page-locked) memory. Tensors elsewhere are copied there afterwards.
    pub fn pinned(&self) -> bool {
        self.pinned
    }

    /// Reads the next sample; `None` at the end of the batch.
    ///
    /// # Errors
    /// The sample could not be read, and the loader's policy is to fail: return this error from the collate function.
    // Not an iterator: the caller uses `self` between two samples.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Result<Option<Drawn<S>>, DataError> {
        let begun = Instant::now();
        let drawn = self.source.draw();
        self.times.add(Stage::Read, begun.elapsed());
        match &drawn {
            Ok(Some(drawn)) => self.raw = self.raw.max(self.source.bytes(&drawn.sample)),
            Ok(None) => self.source.complete(),
            Err(_) => {}
        }
        drawn
    }

    /// Reads all remaining samples.
    ///
    /// # Errors
    /// As [`next`](Self::next); [`DataError::EmptyBatch`] when no sample remains.
    pub fn all(&mut self) -> Result<Vec<S>, DataError> {
        let begun = Instant::now();
        let mut samples = Vec::with_capacity(self.len());
        while let Some(drawn) = self.source.draw()? {
            self.raw = self.raw.saturating_add(self.source.bytes(&drawn.sample));
            samples.push(drawn.sample);
        }
        self.source.complete();
        self.times.add(Stage::Read, begun.elapsed());
        if samples.is_empty() { Err(DataError::EmptyBatch) } else { Ok(samples) }
    }

    /// What [`Collate::prepare`](crate::Collate) has made of the sample drawn last, where another worker called it.
    pub(crate) fn prepared<P: 'static>(&mut self) -> Option<P> {
        self.source.prepared().and_then(|prepared| prepared.0.downcast().ok()).map(|prepared| *prepared)
    }

    /// The indices of all remaining samples, for a collate function that reads them together.
    pub(crate) fn indices(&mut self) -> Result<Vec<i64>, DataError> {
        let indices = self.source.indices()?;
        self.source.complete();
        if indices.is_empty() {
            Err(DataError::EmptyBatch)
        } else {
            Ok(indices.into_iter().map(|i| i as i64).collect())
        }
    }

    /// Reports that the sample drawn last is bad.
    ///
    /// # Errors
    /// The loader's policy is to fail, or no good substitute was found: return this error from the collate function.
    pub fn reject(&mut self, error: DataError) -> Result<(), DataError> {
        self.source.reject(error)
    }

    /// Adds time to a stage of the loader's statistics; time that is added to no stage counts as [`Stage::Collate`].
    pub fn spent(&mut self, stage: Stage, time: Duration) {
        self.times.add(stage, time);
    }

    /// Sets how many samples the batch counts as in the loader's statistics, where one drawn sample stands for several.
    pub fn counts(&mut self, samples: usize) {
        self.counted = Some(samples);
    }

    /// Whether the batch is still wanted: a collate function that takes long for one batch should check it.
    pub fn cancelled(&self) -> Cancellation {
        self.source.cancelled()
    }

    pub(crate) fn counted(&self) -> Option<usize> {
        self.counted
    }

    /// The bytes of the samples that were in memory at once: all of them where they are collated together, else the
    /// largest, as a collate function that asks for one after the other need not keep them.
    pub(crate) fn raw(&self) -> usize {
        self.raw
    }

    pub(crate) fn times(&self) -> StageTimes {
        self.times
    }
}

/// Samples that are already read; their positions serve as indices.
pub(crate) struct Listed<S> {
    len: usize,
    samples: std::iter::Enumerate<std::vec::IntoIter<S>>,
    last: usize,
}

impl<S> From<Vec<S>> for Listed<S> {
    fn from(samples: Vec<S>) -> Self {
        Self { len: samples.len(), samples: samples.into_iter().enumerate(), last: 0 }
    }
}

impl<S> Feed<S> for Listed<S> {
    fn len(&self) -> usize {
        self.len
    }

    fn draw(&mut self) -> Result<Option<Drawn<S>>, DataError> {
        let Some((position, sample)) = self.samples.next() else { return Ok(None) };
        self.last = position;
        Ok(Some(Drawn::new(sample, position as u64, position as u64)))
    }

    fn reject(&mut self, error: DataError) -> Result<(), DataError> {
        Err(DataError::Sample { index: self.last, key: None, error: Box::new(error) })
    }

    fn complete(&mut self) {}
}
