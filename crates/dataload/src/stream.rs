//! Streams of shards, for data that is read from front to back.

use std::sync::Arc;

use crate::sample_bytes::measured;
use crate::{Cancellation, DataError, Deferred, Filter, Map};

/// The samples of one shard, in order.
///
/// An `Err` takes the place of a bad sample. After it, the iterator continues if the format lets it find the next
/// sample; otherwise it ends.
pub type Samples<S> = Box<dyn Iterator<Item = Result<S, DataError>> + Send>;

/// Samples in shards: each shard is read from front to back, and several are open at a time.
///
/// Like a [`Dataset`](crate::Dataset) it is a pure function, here of the shard and the position in it. That makes a run
/// reproducible, independent of the number of workers, and exactly resumable.
///
/// # Source
/// `torch.utils.data.IterableDataset`, where the user divides the work between workers (`get_worker_info`).
pub trait IterableDataset: Send + Sync {
    /// The type of a sample.
    type Sample: Send + 'static;

    /// How many shards there are.
    fn shards(&self) -> usize;

    /// Opens the shard with this number, which is below [`shards`](Self::shards), after its first `position` items.
    ///
    /// Items are counted as the stream gives them, errors included, so that a run which skipped a bad sample resumes
    /// after it. A position past the last item gives an empty stream.
    ///
    /// # Errors
    /// [`DataError::IndexOutOfRange`] for a shard that does not exist; any error of opening it.
    fn open_shard(&self, shard: usize, position: u64) -> Result<Samples<Self::Sample>, DataError>;

    /// Like [`open_shard`](Self::open_shard), but work that need not be done in the stream's order is deferred. Loaders
    /// call this form, so that a [`map`](Self::map) runs in all workers at once.
    ///
    /// Dropping an epoch waits up to 5 s for a running call, and then leaves its thread behind: an implementation that
    /// takes long to reach `position` or to find the next sample should check `cancelled` regularly. The default
    /// implementation does not.
    ///
    /// # Errors
    /// As [`open_shard`](Self::open_shard); [`DataError::Cancelled`].
    fn open_deferred(
        &self,
        shard: usize,
        position: u64,
        _cancelled: &Cancellation,
    ) -> Result<Samples<Deferred<Self::Sample>>, DataError> {
        Ok(Box::new(measured(self.open_shard(shard, position)?)))
    }

    /// Called when the shard with this number will be opened soon, so that its bytes can be fetched in the background.
    fn read_ahead(&self, _shard: usize) {}

    /// The name of the shard with this number, usually its file; errors and faults show it.
    fn shard_name(&self, _shard: usize) -> Option<String> {
        None
    }

    /// A number that changes with what decides about the items and their order besides the shards and their names: a saved
    /// state of another one is refused. 0, the default, for nothing.
    fn fingerprint(&self) -> u64 {
        0
    }

    /// A dataset that passes every sample through `transform`.
    ///
    /// In a loader, `transform` runs in all workers at once, and [`OnError`](crate::OnError) decides about a sample for
    /// which it returns an error. Reading, including decompression, is done by one worker at a time in each of the
    /// interleaved shards.
    fn map<T, F>(self, transform: F) -> Map<Self, F>
    where
        Self: Sized,
        T: Send + 'static,
        F: Fn(Self::Sample) -> Result<T, DataError> + Send + Sync,
    {
        Map::new(self, transform)
    }

    /// A stream of the samples for which `keep` is true.
    ///
    /// Samples are made where a shard is read, by one worker at a time, since `keep` has to see them: filter first,
    /// then [`map`](Self::map). Where a shard is opened in its middle, on resume, it is read from its start.
    fn filter<F>(self, keep: F) -> Filter<Self, F>
    where
        Self: Sized,
        F: Fn(&Self::Sample) -> Result<bool, DataError> + Send + Sync,
    {
        Filter::new(self, keep)
    }

    /// The samples of the shards in `order`, one shard after the other.
    ///
    /// Worker `w` of `n` takes `(w..dataset.shards()).step_by(n)`; a shuffled epoch takes a permutation.
    fn stream(&self, order: impl IntoIterator<Item = usize>) -> ShardStream<&Self>
    where
        Self: Sized,
    {
        self.stream_from(order, StreamPosition::default())
    }

    /// The same from `position` on, which an earlier stream over the same `order` returned.
    fn stream_from(&self, order: impl IntoIterator<Item = usize>, position: StreamPosition) -> ShardStream<&Self>
    where
        Self: Sized,
    {
        ShardStream::new(self, order, position)
    }
}

/// Passes over `count` items, or all where there are fewer; gives up when `cancelled`.
pub(crate) fn pass_over(items: &mut impl Iterator, count: u64, cancelled: &Cancellation) -> Result<(), DataError> {
    for _ in 0..count {
        cancelled.check()?;
        if items.next().is_none() {
            break;
        }
    }
    Ok(())
}

/// What a stream over the shards of another takes from it: their number, names, fingerprint and reading ahead.
macro_rules! shards_of {
    ($self:ident => $stream:expr) => {
        fn shards(&$self) -> usize {
            $stream.shards()
        }

        fn read_ahead(&$self, shard: usize) {
            $stream.read_ahead(shard);
        }

        fn fingerprint(&$self) -> u64 {
            $stream.fingerprint()
        }

        fn shard_name(&$self, shard: usize) -> Option<String> {
            $stream.shard_name(shard)
        }
    };
}

pub(crate) use shards_of;

macro_rules! forward_iterable {
    ($($pointer:ty),*) => {$(
        impl<D: IterableDataset + ?Sized> IterableDataset for $pointer {
            type Sample = D::Sample;

            shards_of!(self => (**self));

            fn open_shard(&self, shard: usize, position: u64) -> Result<Samples<D::Sample>, DataError> {
                (**self).open_shard(shard, position)
            }

            fn open_deferred(
                &self,
                shard: usize,
                position: u64,
                cancelled: &Cancellation,
            ) -> Result<Samples<Deferred<D::Sample>>, DataError> {
                (**self).open_deferred(shard, position, cancelled)
            }
        }
    )*};
}

forward_iterable!(&D, Box<D>, Arc<D>);

/// The position of a [`ShardStream`], from which it can be resumed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct StreamPosition {
    /// The position in the stream's order of shards, from 0.
    pub shard: usize,
    /// How many items of that shard have been given.
    pub sample: u64,
}

/// The samples of several shards; made by [`IterableDataset::stream`].
///
/// A shard that cannot be opened gives one `Err` in its place, and the stream continues with the next shard.
pub struct ShardStream<D: IterableDataset> {
    dataset: D,
    order: Box<[usize]>,
    position: StreamPosition,
    samples: Option<Samples<Deferred<D::Sample>>>,
}

/// The shard that an item is from, its position there, and the item.
pub(crate) type Located<S> = (usize, u64, Result<Deferred<S>, DataError>);

impl<D: IterableDataset> ShardStream<D> {
    pub(crate) fn new(dataset: D, order: impl IntoIterator<Item = usize>, position: StreamPosition) -> Self {
        Self { dataset, order: order.into_iter().collect(), position, samples: None }
    }

    /// The position of the next sample; [`IterableDataset::stream_from`] resumes there.
    pub fn position(&self) -> StreamPosition {
        self.position
    }

    /// The shard that is being read, and the position of its next item.
    pub(crate) fn place(&self) -> Option<(usize, u64)> {
        self.order.get(self.position.shard).map(|&shard| (shard, self.position.sample))
    }

    /// The next item with its origin; `None` at the end, or when `cancelled`, after which the stream must not be used
    /// any more.
    pub(crate) fn next_item(&mut self, cancelled: &Cancellation) -> Option<Located<D::Sample>> {
        while !cancelled.is_cancelled() {
            let &shard = self.order.get(self.position.shard)?;
            let samples = match &mut self.samples {
                Some(samples) => samples,
                None => {
                    if let Some(&following) = self.order.get(self.position.shard + 1) {
                        self.dataset.read_ahead(following);
                    }
                    match self.dataset.open_deferred(shard, self.position.sample, cancelled) {
                        Ok(samples) => self.samples.insert(samples),
                        Err(error) => {
                            let position = self.position.sample;
                            self.next_shard();
                            return Some((shard, position, Err(error)));
                        }
                    }
                }
            };
            match samples.next() {
                Some(item) => {
                    self.position.sample += 1;
                    return Some((shard, self.position.sample - 1, item));
                }
                None => self.next_shard(),
            }
        }
        None
    }

    fn next_shard(&mut self) {
        self.samples = None;
        self.position = StreamPosition { shard: self.position.shard + 1, sample: 0 };
    }
}

impl<D: IterableDataset> Iterator for ShardStream<D> {
    type Item = Result<D::Sample, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        self.next_item(&Cancellation::default()).map(|(_, _, item)| item.and_then(Deferred::get))
    }
}

impl<T, D, F> IterableDataset for Map<D, F>
where
    T: Send + 'static,
    D: IterableDataset,
    D::Sample: 'static,
    F: Fn(D::Sample) -> Result<T, DataError> + Send + Sync + 'static,
{
    type Sample = T;

    shards_of!(self => self.dataset);

    fn open_shard(&self, shard: usize, position: u64) -> Result<Samples<T>, DataError> {
        let samples = self.dataset.open_shard(shard, position)?;
        let transform = self.transform.clone();
        Ok(Box::new(samples.map(move |sample| sample.and_then(&*transform))))
    }

    fn open_deferred(
        &self,
        shard: usize,
        position: u64,
        cancelled: &Cancellation,
    ) -> Result<Samples<Deferred<T>>, DataError> {
        let samples = self.dataset.open_deferred(shard, position, cancelled)?;
        let transform = self.transform.clone();
        let defer = move |sample: Deferred<D::Sample>| {
            let transform = transform.clone();
            sample.then(move |sample| transform(sample))
        };
        Ok(Box::new(samples.map(move |sample| sample.map(&defer))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::FnStream;

    /// Shard 1 cannot be opened; shard 2 has a bad sample in the middle.
    fn bumpy() -> impl IterableDataset<Sample = usize> {
        FnStream::new(3, |shard| match shard {
            1 => Err(DataError::other("no shard 1")),
            _ => Ok((0..3).map(move |i| match (shard, i) {
                (2, 1) => Err(DataError::other("bad")),
                _ => Ok(shard * 10 + i),
            })),
        })
    }

    fn seen(stream: impl Iterator<Item = Result<usize, DataError>>) -> Vec<String> {
        stream.map(|item| item.map_or_else(|error| error.to_string(), |sample| sample.to_string())).collect()
    }

    #[test]
    fn shards_follow_each_other_and_errors_keep_their_place() {
        let dataset: Arc<dyn IterableDataset<Sample = usize>> = Arc::new(bumpy().map(|i| Ok(i + 1)));
        assert_eq!(seen(dataset.stream(0..3)), ["1", "2", "3", "no shard 1", "21", "bad", "23"]);
        assert_eq!(seen(dataset.stream([2, 0])), ["21", "bad", "23", "1", "2", "3"]);
        assert!(seen(dataset.stream([7]))[0].contains("index 7 is out of range"));
        assert!(seen(dataset.stream([])).is_empty());
    }

    #[test]
    fn every_position_resumes_exactly() {
        let dataset = bumpy();
        let all = seen(dataset.stream(0..3));
        let mut stream = dataset.stream(0..3);
        for given in 0..=all.len() {
            assert_eq!(seen(dataset.stream_from(0..3, stream.position())), all[given..], "after {given}");
            stream.next();
        }
        assert!(stream.next().is_none());
    }
}
