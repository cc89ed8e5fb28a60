//! The options of a loader, with PyTorch's names and meaning.

use crate::{
    BatchSampler, Collate, DataError, DataLoader, Dataset, FixedBatches, RandomSampler, Sampler, SequentialSampler,
    Stack,
};

/// More threads than this are a slip of the pen, and starting them could take the machine down.
const MAX_WORKERS: usize = 1024;

/// Collects the options of a [`DataLoader`]; made by [`DataLoader::builder`].
#[must_use = "call build() to get the loader"]
pub struct DataLoaderBuilder<D, C = Stack> {
    dataset: D,
    collate: C,
    batch_size: Option<usize>,
    shuffle: bool,
    sampler: Option<Box<dyn Sampler>>,
    batch_sampler: Option<Box<dyn BatchSampler>>,
    num_workers: usize,
    prefetch_factor: usize,
    drop_last: bool,
    seed: u64,
}

impl<D: Dataset> DataLoaderBuilder<D> {
    pub(crate) fn new(dataset: D) -> Self {
        Self {
            dataset,
            collate: Stack,
            batch_size: None,
            shuffle: false,
            sampler: None,
            batch_sampler: None,
            num_workers: 0,
            prefetch_factor: 2,
            drop_last: false,
            seed: 0,
        }
    }
}

impl<D: Dataset, C> DataLoaderBuilder<D, C> {
    /// Samples a batch; 1 unless set.
    pub fn batch_size(mut self, batch_size: usize) -> Self {
        self.batch_size = Some(batch_size);
        self
    }

    /// Whether every epoch has a new random order, see [`RandomSampler`]; off unless set.
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.shuffle = shuffle;
        self
    }

    /// An order of one's own; excludes [`shuffle`](Self::shuffle).
    pub fn sampler(mut self, sampler: impl Sampler + 'static) -> Self {
        self.sampler = Some(Box::new(sampler));
        self
    }

    /// Batches of one's own; excludes [`batch_size`](Self::batch_size), [`shuffle`](Self::shuffle),
    /// [`sampler`](Self::sampler) and [`drop_last`](Self::drop_last).
    pub fn batch_sampler(mut self, batch_sampler: impl BatchSampler + 'static) -> Self {
        self.batch_sampler = Some(Box::new(batch_sampler));
        self
    }

    /// Threads that load in the background; 0, the default, loads on the calling thread.
    pub fn num_workers(mut self, num_workers: usize) -> Self {
        self.num_workers = num_workers;
        self
    }

    /// Batches that each worker may be ahead of the consumer; 2 unless set, without effect when there is no worker.
    pub fn prefetch_factor(mut self, prefetch_factor: usize) -> Self {
        self.prefetch_factor = prefetch_factor;
        self
    }

    /// Whether an incomplete last batch is left out; off unless set.
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.drop_last = drop_last;
        self
    }

    /// The seed of [`shuffle`](Self::shuffle); 0 unless set.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// What turns samples into a batch; [`Stack`] unless set.
    #[doc(alias = "collate_fn")]
    pub fn collate<N: Collate<D::Sample>>(self, collate: N) -> DataLoaderBuilder<D, N> {
        DataLoaderBuilder {
            dataset: self.dataset,
            collate,
            batch_size: self.batch_size,
            shuffle: self.shuffle,
            sampler: self.sampler,
            batch_sampler: self.batch_sampler,
            num_workers: self.num_workers,
            prefetch_factor: self.prefetch_factor,
            drop_last: self.drop_last,
            seed: self.seed,
        }
    }
}

impl<D, C> DataLoaderBuilder<D, C>
where
    D: Dataset + 'static,
    C: Collate<D::Sample> + 'static,
{
    /// Makes the loader; no thread is started yet.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a `batch_size` or `prefetch_factor` of 0, more than 1024 workers, and options
    /// that exclude each other.
    pub fn build(self) -> Result<DataLoader<D, C>, DataError> {
        if self.prefetch_factor == 0 {
            return Err(DataError::option("prefetch_factor", "at least 1", 0));
        }
        if self.num_workers > MAX_WORKERS {
            return Err(DataError::option("num_workers", format!("at most {MAX_WORKERS}"), self.num_workers));
        }
        let len = self.dataset.len();
        let own_batches = self.batch_sampler.is_some();
        if own_batches && (self.batch_size.is_some() || self.shuffle || self.sampler.is_some() || self.drop_last) {
            let expected = "no batch_size, shuffle, sampler or drop_last beside it";
            return Err(DataError::option("batch_sampler", expected, "one of them"));
        }
        if self.shuffle && self.sampler.is_some() {
            return Err(DataError::option("sampler", "no shuffle beside it", "shuffle"));
        }
        let batch_sampler = match self.batch_sampler {
            Some(batch_sampler) => batch_sampler,
            None => {
                let sampler = self.sampler.unwrap_or_else(|| match self.shuffle {
                    true => Box::new(RandomSampler::new(len, self.seed)),
                    false => Box::new(SequentialSampler::new(len)),
                });
                Box::new(FixedBatches::new(sampler, self.batch_size.unwrap_or(1), self.drop_last)?)
            }
        };
        Ok(DataLoader::new(self.dataset, self.collate, batch_sampler, self.num_workers, self.prefetch_factor))
    }
}
