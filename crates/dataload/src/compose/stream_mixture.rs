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
/// on of each stream. Whose turn it is depends on (seed, shard, draw) alone, so the mixture is the same in every pass,
/// and a run resumes in it exactly. On resume, a shard is read from its start.
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
/// `datasets.interleave_datasets` of Hugging Face on its `IterableDataset`.
#[derive(Clone, Debug)]
pub struct StreamMixture<D> {
    streams: Vec<Arc<D>>,
    weights: Vec<f64>,
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
        let streams: Vec<Arc<D>> = streams.into_iter().map(Arc::new).collect();
        let lens: Vec<usize> = streams.iter().map(IterableDataset::shards).collect();
        let weights = normalized(&weights.into(), &lens)?;
        let shards = lens.iter().zip(&weights).filter(|&(_, &weight)| weight > 0.0).map(|(&shards, _)| shards).min();
        let (shards, stopping_strategy) = (shards.unwrap_or(0), StoppingStrategy::FirstExhausted);
        Ok(Self { streams, weights, shards, seed, stopping_strategy })
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
    draw: u64,
    cancelled: Cancellation,
}

struct Part<D: IterableDataset> {
    items: ShardStream<Arc<D>>,
    /// 0 once it is not drawn any more.
    weight: f64,
    exhausted: bool,
    /// Whether it has given an item since it began.
    given: bool,
}

impl<D: IterableDataset> Turns<D> {
    fn new(mixture: StreamMixture<D>, shard: usize, cancelled: Cancellation) -> Self {
        let part = |(stream, &weight): (usize, &f64)| Part {
            items: mixture.part(stream, shard),
            weight,
            exhausted: weight == 0.0,
            given: false,
        };
        let parts = mixture.weights.iter().enumerate().map(part).collect();
        Self { mixture, shard, parts, draw: 0, cancelled }
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
        while !self.cancelled.is_cancelled() && self.parts.iter().any(|part| !part.exhausted) {
            let stream = self.due()?;
            let part = &mut self.parts[stream];
            if let Some((shard, _, item)) = part.items.next_item(&self.cancelled) {
                part.given = true;
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
                _ => part.weight = 0.0,
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
        let mixture = Self { streams: self.streams.clone(), weights: self.weights.clone(), ..*self };
        let mut turns = Turns::new(mixture, shard, cancelled.clone());
        pass_over(&mut turns, position, cancelled)?;
        Ok(Box::new(turns))
    }

    fn fingerprint(&self) -> u64 {
        let stream = |stream: &Arc<D>| (stream.shards(), names(&**stream), stream.fingerprint());
        let streams: Vec<_> = self.streams.iter().map(stream).collect();
        fingerprint(&(streams, &self.weights, self.seed, self.stopping_strategy))
    }

    fn read_ahead(&self, shard: usize) {
        self.streams.iter().filter(|stream| shard < stream.shards()).for_each(|stream| stream.read_ahead(shard));
    }
}
