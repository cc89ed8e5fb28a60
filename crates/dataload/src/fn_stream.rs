//! A stream of shards from a closure.

use std::iter::Fuse;
use std::sync::Arc;

use crate::sample_bytes::measured;
use crate::stream::pass_over;
use crate::{Cancellation, DataError, Deferred, IterableDataset, Samples};

/// A closure as a stream of shards.
///
/// ```
/// use overdrive_dataload::{FnStream, IterableDataset};
///
/// let counts = FnStream::new(2, |shard| Ok((0..3).map(move |i| Ok(shard * 10 + i))));
/// let all: Vec<usize> = counts.stream(0..2).collect::<Result<_, _>>()?;
/// assert_eq!(all, [0, 1, 2, 10, 11, 12]);
/// # Ok::<(), overdrive_dataload::DataError>(())
/// ```
#[derive(Clone, Debug)]
pub struct FnStream<F> {
    shards: usize,
    open: F,
    names: Arc<[String]>,
}

impl<F> FnStream<F> {
    /// A stream of `shards` shards; `open(i)` returns the iterator over shard `i`.
    ///
    /// On resume, a new iterator is opened, and its first items are read and dropped. Where there is a faster way to a
    /// position, implement [`IterableDataset`] instead.
    pub fn new<S, I>(shards: usize, open: F) -> Self
    where
        F: Fn(usize) -> Result<I, DataError> + Send + Sync,
        I: Iterator<Item = Result<S, DataError>> + Send,
    {
        Self { shards, open, names: Arc::default() }
    }

    /// The names of the shards, in order; errors and faults show them. Shards without a name are shown by number.
    pub fn shard_names(mut self, names: impl IntoIterator<Item = impl Into<String>>) -> Self {
        self.names = names.into_iter().map(Into::into).collect();
        self
    }
}

impl<S, I, F> FnStream<F>
where
    I: Iterator<Item = Result<S, DataError>> + Send + 'static,
    F: Fn(usize) -> Result<I, DataError> + Send + Sync,
{
    fn samples(&self, shard: usize, position: u64, cancelled: &Cancellation) -> Result<Fuse<I>, DataError> {
        DataError::check_index(shard, self.shards)?;
        let mut samples = (self.open)(shard)?.fuse();
        pass_over(&mut samples, position, cancelled)?;
        Ok(samples)
    }
}

impl<S, I, F> IterableDataset for FnStream<F>
where
    S: Send + 'static,
    I: Iterator<Item = Result<S, DataError>> + Send + 'static,
    F: Fn(usize) -> Result<I, DataError> + Send + Sync,
{
    type Sample = S;

    fn shards(&self) -> usize {
        self.shards
    }

    fn open_shard(&self, shard: usize, position: u64) -> Result<Samples<S>, DataError> {
        Ok(Box::new(self.samples(shard, position, &Cancellation::default())?))
    }

    fn open_deferred(
        &self,
        shard: usize,
        position: u64,
        cancelled: &Cancellation,
    ) -> Result<Samples<Deferred<S>>, DataError> {
        Ok(Box::new(measured(self.samples(shard, position, cancelled)?)))
    }

    fn shard_name(&self, shard: usize) -> Option<String> {
        self.names.get(shard).cloned()
    }
}
