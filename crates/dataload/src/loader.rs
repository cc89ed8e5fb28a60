//! The loader: what to load, in which order, on how many threads.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Instant;

use crate::pipeline::{Pipeline, Stages};
use crate::stats::Counters;
use crate::{BatchSampler, Collate, DataError, DataLoaderBuilder, Dataset, Epoch, LoaderStats, Stack};

/// Batches of a dataset, made ahead of time on background threads.
///
/// Every iteration is a new epoch. The batches of an epoch depend on the seed and on the epoch's number, not on the
/// number of workers, nor on timing.
///
/// # Syncs
/// Asking for a batch blocks until it is there; no device is waited for.
///
/// # Source
/// `torch.utils.data.DataLoader`.
pub struct DataLoader<D, C = Stack> {
    stages: Arc<Stages<D, C>>,
    batch_sampler: Box<dyn BatchSampler>,
    num_workers: usize,
    in_flight: usize,
    next_epoch: AtomicU64,
    counters: Arc<Counters>,
}

impl<D: Dataset> DataLoader<D> {
    /// Starts from PyTorch's defaults: batches of 1, in the dataset's order, on the calling thread.
    pub fn builder(dataset: D) -> DataLoaderBuilder<D> {
        DataLoaderBuilder::new(dataset)
    }
}

impl<D, C> DataLoader<D, C>
where
    D: Dataset + 'static,
    C: Collate<D::Sample> + 'static,
{
    pub(crate) fn new(
        dataset: D,
        collate: C,
        batch_sampler: Box<dyn BatchSampler>,
        num_workers: usize,
        prefetch_factor: usize,
    ) -> Self {
        Self {
            stages: Arc::new(Stages { dataset, collate }),
            batch_sampler,
            num_workers,
            in_flight: num_workers.saturating_mul(prefetch_factor),
            next_epoch: AtomicU64::new(0),
            counters: Arc::default(),
        }
    }

    /// The next epoch: 0 at first, one more with each call, unless [`set_epoch`](Self::set_epoch) says otherwise.
    pub fn iter(&self) -> Epoch<D, C> {
        self.epoch(self.next_epoch.fetch_add(1, Relaxed))
    }

    /// The epoch with this number; which one [`iter`](Self::iter) gives next is not affected.
    ///
    /// Workers start at once, see [`Epoch`].
    pub fn epoch(&self, epoch: u64) -> Epoch<D, C> {
        let asked = Instant::now();
        let pipeline = Pipeline { stages: self.stages.clone(), plan: self.batch_sampler.plan(epoch) };
        let epoch = Epoch::start(pipeline, self.num_workers, self.in_flight, self.counters.clone());
        self.counters.waited(asked.elapsed());
        epoch
    }
}

impl<D, C> DataLoader<D, C> {
    /// Makes `epoch` the one that [`iter`](Self::iter) gives next.
    pub fn set_epoch(&self, epoch: u64) {
        self.next_epoch.store(epoch, Relaxed);
    }

    /// How many batches an epoch has.
    pub fn len(&self) -> usize {
        self.batch_sampler.len()
    }

    /// Whether an epoch has no batch at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The dataset.
    pub fn dataset(&self) -> &D {
        &self.stages.dataset
    }

    /// Batches and waiting time of all epochs since the start or the last [`reset_stats`](Self::reset_stats).
    pub fn stats(&self) -> LoaderStats {
        self.counters.snapshot()
    }

    /// Sets the statistics to zero.
    pub fn reset_stats(&self) {
        self.counters.reset();
    }
}

impl<D, C> IntoIterator for &DataLoader<D, C>
where
    D: Dataset + 'static,
    C: Collate<D::Sample> + 'static,
{
    type Item = Result<C::Batch, DataError>;
    type IntoIter = Epoch<D, C>;

    fn into_iter(self) -> Epoch<D, C> {
        self.iter()
    }
}

impl<D, C> IntoIterator for &mut DataLoader<D, C>
where
    D: Dataset + 'static,
    C: Collate<D::Sample> + 'static,
{
    type Item = Result<C::Batch, DataError>;
    type IntoIter = Epoch<D, C>;

    fn into_iter(self) -> Epoch<D, C> {
        self.iter()
    }
}

impl<D, C> fmt::Debug for DataLoader<D, C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataLoader")
            .field("batches", &self.len())
            .field("num_workers", &self.num_workers)
            .field("in_flight", &self.in_flight)
            .field("next_epoch", &self.next_epoch)
            .finish_non_exhaustive()
    }
}
