//! Streams without the samples that are not wanted.

use std::sync::Arc;

use crate::stream::{pass_over, shards_of};
use crate::{Cancellation, DataError, Deferred, IterableDataset, Samples};

/// A stream of the samples that a predicate keeps; made by
/// [`IterableDataset::filter`].
///
/// ```
/// use overdrive_dataload::{FnStream, IterableDataset};
///
/// let odd = FnStream::new(2, |shard| Ok((0..4).map(move |i| Ok(shard * 10 + i)))).filter(|i| Ok(i % 2 == 1));
/// assert_eq!(odd.stream(0..2).collect::<Result<Vec<_>, _>>()?, [1, 3, 11, 13]);
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
///
/// # Source
/// `datasets.IterableDataset.filter` of Hugging Face.
#[derive(Debug)]
pub struct Filter<D, F> {
    stream: D,
    /// Shared with the open shards.
    keep: Arc<F>,
}

impl<D: Clone, F> Clone for Filter<D, F> {
    fn clone(&self) -> Self {
        Self { stream: self.stream.clone(), keep: self.keep.clone() }
    }
}

impl<D, F> Filter<D, F> {
    pub(crate) fn new(stream: D, keep: F) -> Self {
        Self { stream, keep: Arc::new(keep) }
    }
}

impl<D, F> Filter<D, F>
where
    D: IterableDataset,
    F: Fn(&D::Sample) -> Result<bool, DataError> + Send + Sync + 'static,
{
    /// The kept items of a shard after the first `position` of them, errors included.
    fn kept(
        &self,
        shard: usize,
        position: u64,
        cancelled: &Cancellation,
    ) -> Result<Samples<Deferred<D::Sample>>, DataError> {
        let keep = self.keep.clone();
        let decide = move |mut item: Deferred<D::Sample>| {
            let (key, bytes) = (item.take_key(), item.bytes());
            // Whether an item is kept is known only once its sample is made.
            match item.get().and_then(|sample| Ok(keep(&sample)?.then_some(sample))) {
                Ok(sample) => Some(Deferred::ready(sample?).with_key(key).of_bytes(bytes)),
                Err(error) => Some(Deferred::later(|| Err(error)).with_key(key)),
            }
        };
        let mut items = self.stream.open_deferred(shard, 0, cancelled)?;
        let stop = cancelled.clone();
        let mut kept = std::iter::from_fn(move || {
            loop {
                // Many items may be left out in a row, without an end.
                if let Err(error) = stop.check() {
                    return Some(Err(error));
                }
                if let Some(item) = items.next()?.map(&decide).transpose() {
                    return Some(item);
                }
            }
        });
        pass_over(&mut kept, position, cancelled)?;
        Ok(Box::new(kept))
    }
}

impl<D, F> IterableDataset for Filter<D, F>
where
    D: IterableDataset,
    F: Fn(&D::Sample) -> Result<bool, DataError> + Send + Sync + 'static,
{
    type Sample = D::Sample;

    shards_of!(self => self.stream);

    fn open_shard(&self, shard: usize, position: u64) -> Result<Samples<D::Sample>, DataError> {
        let kept = self.kept(shard, position, &Cancellation::default())?;
        Ok(Box::new(kept.map(|item| item.and_then(Deferred::get))))
    }

    fn open_deferred(
        &self,
        shard: usize,
        position: u64,
        cancelled: &Cancellation,
    ) -> Result<Samples<Deferred<D::Sample>>, DataError> {
        self.kept(shard, position, cancelled)
    }
}
