//! Streams one after the other.

use super::concat::{cumulative, locate};
use crate::loader::fingerprint;
use crate::{Cancellation, DataError, Deferred, IterableDataset, Samples};

/// The shards of several streams, one stream after the other.
///
/// Streams of different types with the same type of sample go in as `Box<dyn IterableDataset<Sample = S>>`.
///
/// ```
/// use overdrive_dataload::{Chain, FnStream, IterableDataset};
///
/// let count = |from: usize| FnStream::new(1, move |_| Ok((from..from + 2).map(Ok)));
/// let both = Chain::new([count(0), count(10)])?;
/// let all: Vec<usize> = both.stream(0..both.shards()).collect::<Result<_, _>>()?;
/// assert_eq!(all, [0, 1, 10, 11]);
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// `torch.utils.data.ChainDataset`; a loader takes the shards in its own order, as those of one stream.
#[derive(Clone, Debug)]
#[doc(alias = "ChainDataset")]
pub struct Chain<D> {
    streams: Vec<D>,
    /// For each stream, how many shards it and those before it have.
    ends: Vec<usize>,
}

impl<D: IterableDataset> Chain<D> {
    /// These streams, in this order.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] when there is no stream, or their shards together exceed `usize`.
    pub fn new(streams: impl IntoIterator<Item = D>) -> Result<Self, DataError> {
        let streams: Vec<D> = streams.into_iter().collect();
        let ends = cumulative(streams.iter().map(D::shards))?;
        Ok(Self { streams, ends })
    }

    fn shard(&self, shard: usize) -> Result<(&D, usize), DataError> {
        let (stream, shard) = locate(&self.ends, shard)?;
        Ok((&self.streams[stream], shard))
    }
}

impl<D: IterableDataset> IterableDataset for Chain<D> {
    type Sample = D::Sample;

    fn shards(&self) -> usize {
        self.ends.last().copied().unwrap_or(0)
    }

    fn open_shard(&self, shard: usize, position: u64) -> Result<Samples<D::Sample>, DataError> {
        let (stream, shard) = self.shard(shard)?;
        stream.open_shard(shard, position)
    }

    fn open_deferred(
        &self,
        shard: usize,
        position: u64,
        cancelled: &Cancellation,
    ) -> Result<Samples<Deferred<D::Sample>>, DataError> {
        let (stream, shard) = self.shard(shard)?;
        stream.open_deferred(shard, position, cancelled)
    }

    fn read_ahead(&self, shard: usize) {
        if let Ok((stream, shard)) = self.shard(shard) {
            stream.read_ahead(shard);
        }
    }

    fn fingerprint(&self) -> u64 {
        let all = self.streams.iter().map(D::fingerprint);
        if all.clone().all(|one| one == 0) { 0 } else { fingerprint(&all.collect::<Vec<_>>()) }
    }

    fn shard_name(&self, shard: usize) -> Option<String> {
        let (stream, shard) = self.shard(shard).ok()?;
        stream.shard_name(shard)
    }
}
