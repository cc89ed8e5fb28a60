//! A weighted mixture of streams.

use std::sync::Arc;

use super::mixture::normalized;
use crate::loader::{fingerprint, names};
use crate::rng::unit;
use crate::stream::pass_over;
use crate::{
    Cancellation, DataError, Deferred, IterableDataset, Philox, Samples, ShardStream, StoppingStrategy, StreamPosition,
};

/// Separates the random stream of mixtures from others with the same seed.
const TURNS: u64 = 0x6d69_7873_7475_726e;

/// Draws each item from one of several streams, in proportion to weights.
///
/// It has as many shards as the stream with the fewest: shard `s` of `n` draws from shards `s`, `s + n`, `s + 2n` and so
/// on of each stream. Whose turn it is depends on (weights, seed, shard, draw) alone, so the mixture is the same in every
/// pass, and a run resumes in it exactly; a state of other weights is refused. On resume, a shard is read from its start.
///
/// ```
/// use overdrive_dataload::{FnStream, IterableDataset, StreamMixture};
///
/// let count = |from: usize| FnStream::new(1, move |_| Ok((from..from + 1000).map(Ok)));
/// let mixed = StreamMixture::new([count(0), count(5000)], [0.9, 0.1], 0)?;
/// let items: Vec<usize> = mixed.stream([0]).collect::<Result<_, _>>()?;
/// let few = items.iter().filter(|&&item| item >= 5000).count();
/// assert!((80..145).contains(&few) && items.len() == 1000 + few);
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// `datasets.interleave_datasets` of Hugging Face on its `IterableDataset`. There, a mixture ends with the last item of a
/// stream; here nothing is read ahead to know which that is, so it ends when that stream is due again.
#[derive(Clone, Debug)]
pub struct StreamMixture<D> {
    streams: Vec<Arc<D>>,
    /// The item from which on weights count, one per stream and 1 in total; the first from the start.
    stages: Vec<(u64, Vec<f64>)>,
    shards: usize,
    seed: u64,
    stopping_strategy: StoppingStrategy,
}

impl<D: IterableDataset> StreamMixture<D> {
    /// Draws from `streams` by `weights`, which need not add up to 1. A shard ends when a stream is due that has no more
    /// items in it. Streams of different types go in as `Box<dyn IterableDataset<Sample = S>>`.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for weights that are not one per stream, a weight that is negative or not finite,
    /// where none is above 0, and for a stream without shards whose weight is above 0.
    pub fn new(
        streams: impl IntoIterator<Item = D>,
        weights: impl Into<Vec<f64>>,
        seed: u64,
    ) -> Result<Self, DataError> {
        let streams = streams.into_iter().map(Arc::new).collect();
        let stopping_strategy = StoppingStrategy::FirstExhausted;
        Self { streams, stages: Vec::new(), shards: usize::MAX, seed, stopping_strategy }.stage(0, weights.into())
    }

    /// Weights from `item` on. There are no more shards than each stream has that is drawn.
    fn stage(mut self, item: u64, weights: Vec<f64>) -> Result<Self, DataError> {
        let lens: Vec<usize> = self.streams.iter().map(IterableDataset::shards).collect();
        let weights = normalized(&weights, &lens)?;
        let drawn = lens.into_iter().zip(&weights).filter(|&(_, &weight)| weight > 0.0);
        self.shards = drawn.map(|(shards, _)| shards).fold(self.shards, usize::min);
        self.stages.push((item, weights));
        Ok(self)
    }

    /// Other weights from item number `item` of a pass on, counted over all shards: in each of `n` shards, from its own
    /// item `item / n` on. So the shards change together where all of them are read at once: set
    /// [`interleave`](crate::DataLoaderBuilder::interleave) to their number, see [`num_shards`](Self::num_shards). At
    /// step `s`, `item` is `s * batch_size * world_size`, with `batches_per_epoch` also in later epochs, as long as the
    /// pass lasts. Each pass begins with the first weights.
    ///
    /// A loader that shuffles mixes the items before and after the change within a
    /// [`shuffle_buffer`](crate::DataLoaderBuilder::shuffle_buffer).
    ///
    /// A stream that has no weight from some item on does not have to be exhausted. What happens where one is exhausted
    /// before is the [`stopping_strategy`](Self::stopping_strategy)'s: the shard ends, or the stream is repeated, or it
    /// is left out, and weights whose streams are all left out end early.
    ///
    /// A stream with fewer shards than the drawn ones before lowers [`num_shards`](Self::num_shards), also where that was
    /// set: set it last.
    ///
    /// # Errors
    /// As [`new`](Self::new); [`DataError::InvalidOption`] for an item that is not after that of the call before.
    pub fn weights_from(self, item: u64, weights: impl Into<Vec<f64>>) -> Result<Self, DataError> {
        if let Some((last, _)) = self.stages.last().filter(|(last, _)| *last >= item) {
            return Err(DataError::option("weights_from", format!("an item after {last}"), item));
        }
        self.stage(item, weights.into())
    }

    /// How many shards there are, at most as many as the drawn stream with the fewest, which is the default.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for 0 or more than that.
    pub fn num_shards(mut self, num_shards: usize) -> Result<Self, DataError> {
        if !(1..=self.shards).contains(&num_shards) {
            return Err(DataError::option("num_shards", format!("1 to {}", self.shards), num_shards));
        }
        self.shards = num_shards;
        Ok(self)
    }

    /// When a shard ends; when the first stream is exhausted unless set.
    pub fn stopping_strategy(mut self, stopping_strategy: StoppingStrategy) -> Self {
        self.stopping_strategy = stopping_strategy;
        self
    }

    /// A stream's part of a shard.
    fn part(&self, stream: usize, shard: usize) -> ShardStream<Arc<D>> {
        let stream = &self.streams[stream];
        let order = (shard..stream.shards()).step_by(self.shards);
        ShardStream::new(stream.clone(), order, StreamPosition::default())
    }
}

/// The items of one shard.
struct Turns<D: IterableDataset> {
    mixture: StreamMixture<D>,
    shard: usize,
    parts: Vec<Part<D>>,
    stage: usize,
    given: u64,
    draw: u64,
    cancelled: Cancellation,
}

struct Part<D: IterableDataset> {
    items: ShardStream<Arc<D>>,
    /// 0 where it is not drawn at this stage.
    weight: f64,
    /// Whether it has been exhausted, or need not be.
    exhausted: bool,
    /// Whether it is not drawn any more.
    gone: bool,
    /// Whether it has given an item since it began.
    given: bool,
}

impl<D: IterableDataset> Turns<D> {
    fn new(mixture: StreamMixture<D>, shard: usize, cancelled: Cancellation) -> Self {
        let part = |stream| Part {
            items: mixture.part(stream, shard),
            weight: 0.0,
            exhausted: false,
            gone: false,
            given: false,
        };
        let parts = (0..mixture.streams.len()).map(part).collect();
        let mut turns = Self { mixture, shard, parts, stage: 0, given: 0, draw: 0, cancelled };
        turns.enter(0);
        turns
    }

    /// Takes the weights of a stage.
    fn enter(&mut self, stage: usize) {
        self.stage = stage;
        let stages = &self.mixture.stages[stage..];
        for (stream, part) in self.parts.iter_mut().enumerate() {
            part.weight = if part.gone { 0.0 } else { stages[0].1[stream] };
            part.exhausted |= stages.iter().all(|(_, weights)| weights[stream] == 0.0);
        }
    }

    /// Takes the weights that are due, or later ones where nothing is left to draw by those before.
    fn advance(&mut self) {
        let item = self.given.saturating_mul(self.mixture.shards as u64).saturating_add(self.shard as u64);
        while let Some((from, _)) = self.mixture.stages.get(self.stage + 1)
            && (*from <= item || self.parts.iter().all(|part| part.weight == 0.0))
        {
            self.enter(self.stage + 1);
        }
    }

    /// The stream whose turn it is, of those that are still drawn.
    fn due(&mut self) -> Option<usize> {
        let total: f64 = self.parts.iter().map(|part| part.weight).sum();
        let mut turn = total * unit(Philox::new(self.mixture.seed ^ TURNS, self.shard as u64).at(self.draw));
        self.draw += 1;
        let mut due = None;
        for (stream, part) in self.parts.iter().enumerate().filter(|(_, part)| part.weight > 0.0) {
            // The last one too where rounding has left a rest.
            due = Some(stream);
            if turn < part.weight {
                break;
            }
            turn -= part.weight;
        }
        due
    }
}

impl<D: IterableDataset> Iterator for Turns<D> {
    type Item = Result<Deferred<D::Sample>, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        while !self.cancelled.is_cancelled() {
            self.advance();
            if self.parts.iter().all(|part| part.exhausted) {
                return None;
            }
            let stream = self.due()?;
            let part = &mut self.parts[stream];
            if let Some((shard, _, item)) = part.items.next_item(&self.cancelled) {
                part.given = true;
                self.given += 1;
                return Some(item.map(|item| match self.mixture.streams[stream].shard_name(shard) {
                    Some(name) => item.within(&name),
                    None => item,
                }));
            }
            part.exhausted = true;
            match self.mixture.stopping_strategy {
                StoppingStrategy::FirstExhausted => self.parts.iter_mut().for_each(|part| part.exhausted = true),
                StoppingStrategy::AllExhausted if part.given => {
                    (part.items, part.given) = (self.mixture.part(stream, self.shard), false);
                }
                _ => (part.weight, part.gone) = (0.0, true),
            }
        }
        None
    }
}

impl<D: IterableDataset + 'static> IterableDataset for StreamMixture<D> {
    type Sample = D::Sample;

    fn shards(&self) -> usize {
        self.shards
    }

    fn open_shard(&self, shard: usize, position: u64) -> Result<Samples<D::Sample>, DataError> {
        let items = self.open_deferred(shard, position, &Cancellation::default())?;
        Ok(Box::new(items.map(|item| item.and_then(Deferred::get))))
    }

    fn open_deferred(
        &self,
        shard: usize,
        position: u64,
        cancelled: &Cancellation,
    ) -> Result<Samples<Deferred<D::Sample>>, DataError> {
        DataError::check_index(shard, self.shards)?;
        let mixture = Self { streams: self.streams.clone(), stages: self.stages.clone(), ..*self };
        let mut turns = Turns::new(mixture, shard, cancelled.clone());
        pass_over(&mut turns, position, cancelled)?;
        Ok(Box::new(turns))
    }

    fn fingerprint(&self) -> u64 {
        let stream = |stream: &Arc<D>| (stream.shards(), names(&**stream), stream.fingerprint());
        let streams: Vec<_> = self.streams.iter().map(stream).collect();
        fingerprint(&(streams, &self.stages, self.seed, self.stopping_strategy))
    }

    fn read_ahead(&self, shard: usize) {
        self.streams.iter().filter(|stream| shard < stream.shards()).for_each(|stream| stream.read_ahead(shard));
    }
}
