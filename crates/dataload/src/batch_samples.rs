//! What a collate function draws its samples from.

use std::time::{Duration, Instant};

use crate::DataError;
use crate::loader::draw;

/// The samples of one batch, read as they are asked for.
///
/// A collate function that finds a sample to be bad [`reject`](Self::reject)s it: the loader's
/// [`OnError`](crate::OnError) then decides whether the epoch ends, the batch gets smaller, or a substitute follows.
pub struct BatchSamples<'a, S> {
    source: &'a mut dyn Draw<S>,
    epoch: u64,
    batch: usize,
    pinned: bool,
    times: StageTimes,
    counted: Option<usize>,
}

/// A sample with its place in the data.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Drawn<S> {
    /// The sample.
    pub sample: S,
    /// The sample's index in its dataset; in a stream, a number that is made of its shard and its place there.
    pub index: u64,
    /// Its place in the epoch's order of all ranks; in a stream, how often that has begun anew.
    at: u64,
}

impl<S> Drawn<S> {
    pub(crate) fn new(sample: S, index: u64, at: u64) -> Self {
        Self { sample, index, at }
    }

    /// A number of this draw of the sample. What is random about a sample should follow from it and from
    /// [`BatchSamples::epoch`]: so a sample that comes again in an epoch, or on another rank, does not come the same.
    ///
    /// It follows from the index and the place in the epoch's order of all ranks; in a stream, from the index and how often
    /// the stream has begun anew. Workers, a resumed run and, at the same global batch, the number of ranks change nothing.
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
    pub(crate) fn add(&mut self, stage: Stage, time: Duration) {
        self.0[stage as usize] += time;
    }

    pub(crate) fn total(&self) -> Duration {
        self.0.iter().sum()
    }
}

/// Where samples come from.
pub(crate) trait Draw<S> {
    /// How many samples the batch has as long as none is bad.
    fn len(&self) -> usize;
    /// The next good sample.
    fn draw(&mut self) -> Result<Option<Drawn<S>>, DataError>;
    /// Deals with the sample drawn last by the fault policy.
    fn reject(&mut self, error: DataError) -> Result<(), DataError>;
    /// Says that what follows is no longer about a single sample.
    fn complete(&mut self);
}

impl<'a, S> BatchSamples<'a, S> {
    pub(crate) fn new(source: &'a mut dyn Draw<S>, epoch: u64, batch: usize, pinned: bool) -> Self {
        Self { source, epoch, batch, pinned, times: StageTimes::default(), counted: None }
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

    /// The batch's number in its epoch, the same on every rank. What is random about a whole batch should follow from it and
    /// from [`epoch`](Self::epoch), and from [`Drawn::draw`] of its first sample where ranks are to differ.
    pub fn batch(&self) -> usize {
        self.batch
    }

    /// Whether the batch is wanted in page-locked memory. Tensors that lie elsewhere are copied there afterwards.
    pub fn pinned(&self) -> bool {
        self.pinned
    }

    /// Reads the next sample; none at the end of the batch.
    ///
    /// # Errors
    /// To be passed on: the sample could not be read, and the loader's policy is to fail.
    // Not an iterator: the caller goes on using `self` between two samples.
    #[allow(clippy::should_implement_trait)]
    pub fn next(&mut self) -> Result<Option<Drawn<S>>, DataError> {
        let begun = Instant::now();
        let drawn = self.source.draw();
        self.times.add(Stage::Read, begun.elapsed());
        if let Ok(None) = drawn {
            self.source.complete();
        }
        drawn
    }

    /// Reads all samples that are left.
    ///
    /// # Errors
    /// As [`next`](Self::next); [`DataError::EmptyBatch`] when there is none.
    pub fn all(&mut self) -> Result<Vec<S>, DataError> {
        let begun = Instant::now();
        let mut samples = Vec::with_capacity(self.len());
        while let Some(drawn) = self.source.draw()? {
            samples.push(drawn.sample);
        }
        self.source.complete();
        self.times.add(Stage::Read, begun.elapsed());
        if samples.is_empty() { Err(DataError::EmptyBatch) } else { Ok(samples) }
    }

    /// Gives back the sample drawn last, which is bad.
    ///
    /// # Errors
    /// To be passed on: the loader's policy is to fail, or no substitute was to be found.
    pub fn reject(&mut self, error: DataError) -> Result<(), DataError> {
        self.source.reject(error)
    }

    /// Accounts for time in the loader's statistics; what is accounted for nowhere counts as [`Stage::Collate`].
    pub fn spent(&mut self, stage: Stage, time: Duration) {
        self.times.add(stage, time);
    }

    /// Makes the batch count as so many samples in the loader's statistics, where one that is drawn stands for several.
    pub fn counts(&mut self, samples: usize) {
        self.counted = Some(samples);
    }

    pub(crate) fn counted(&self) -> Option<usize> {
        self.counted
    }

    pub(crate) fn times(&self) -> StageTimes {
        self.times
    }
}

/// Samples that are there already; their positions stand for their indices.
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

impl<S> Draw<S> for Listed<S> {
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
