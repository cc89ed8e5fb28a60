//! The loader: what to load, in which order, on how many threads.

mod builder;
mod epoch;
mod fault;
mod from_dataset;
mod from_stream;
mod guard;
mod indexed;
mod lane;
mod merge;
mod order;
mod position;
#[cfg(feature = "progress")]
mod progress;
mod queue;
mod ranges;
mod reader;
mod reorder;
mod stages;
mod stats;
mod streamed;
mod transfer;
mod tuner;
mod work;
mod worker;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use overdrive_core::{StateDict, StateError, Stateful};

pub use builder::{Auto, DataLoaderBuilder, NumWorkers, SampleSource};
pub use epoch::Epoch;
pub use fault::{Fault, OnError};
pub use from_dataset::FromDataset;
pub use from_stream::FromStream;
pub(crate) use order::draw;
#[cfg(feature = "progress")]
pub use progress::Progress;
pub use stats::LoaderStats;
pub(crate) use transfer::TensorOps;

use crate::{Dataset, IterableDataset};
use builder::Machinery;
use epoch::{SharedProgress, Tuning, lock};
use fault::FaultLog;
use position::{Position, Progress as EpochProgress};
use stats::Counters;
use tuner::Tuner;
use work::Source;
use worker::Conduct;

/// Batches of a dataset or a stream, made ahead of time on background threads.
///
/// Every iteration is a new epoch. The batches of an epoch depend on the seed and on the epoch's number, not on the
/// number of workers, nor on timing.
///
/// A stream is not read from its start for each epoch. One that ends early, by a `break`, by `take` or because
/// `batches_per_epoch` have been had, leaves the rest to the epoch with the next number, so that short epochs reach the end of
/// every shard; behind the end of the stream the shards come in a new order. An epoch asked for out of turn, with
/// [`epoch`](Self::epoch) or [`set_epoch`](Self::set_epoch), begins at the start of the pass with its number: the same batches
/// each time.
///
/// As a [`Stateful`], a loader saves which batches the training loop has had: the next iteration after
/// `load_state_dict` goes on behind them. The state fits another number of workers and, at the same global batch, another
/// number of ranks (of a stream, see [`merge_states`](DataLoader::merge_states)); it is refused where data, batch size or
/// seed differ. It takes less than a kilobyte; with `in_order(false)` some bytes more for each batch that is late.
///
/// # Syncs
/// Asking for a batch blocks until it is there; no device is waited for.
///
/// # Source
/// `torch.utils.data.DataLoader`; the state is that of `torchdata.stateful_dataloader.StatefulDataLoader`.
pub struct DataLoader<B> {
    source: Arc<dyn Source<B>>,
    conduct: Conduct,
    tuner: Arc<Mutex<Tuner>>,
    bytes: Option<fn(&B) -> usize>,
    counters: Arc<Counters>,
    faults: Arc<FaultLog>,
    next_epoch: AtomicU64,
    /// The progress of the epoch begun last.
    current: Mutex<Option<SharedProgress>>,
    /// Where to go on after a state was put back.
    resume: Mutex<Option<Position>>,
}

impl DataLoader<()> {
    /// Starts from PyTorch's defaults: batches of 1, in the dataset's order, on the calling thread.
    ///
    /// ```
    /// use overdrive_dataload::{DataLoader, FnDataset};
    ///
    /// let squares = FnDataset::new(10, |index| Ok(index * index));
    /// let loader = DataLoader::builder(squares).batch_size(4).collate(|samples: Vec<usize>| Ok(samples)).build()?;
    /// assert_eq!(loader.iter().next().unwrap()?, [0, 1, 4, 9]);
    /// # Ok::<(), overdrive_dataload::DataError>(())
    /// ```
    // The builder makes a loader of another batch type, so this one cannot name it.
    pub fn builder<D: Dataset>(dataset: D) -> DataLoaderBuilder<FromDataset<D>> {
        DataLoaderBuilder::new(FromDataset::new(dataset))
    }

    /// The same for a stream of shards: batches of 1, four shards side by side, unmixed, on the calling thread.
    ///
    /// ```
    /// use overdrive_dataload::{DataLoader, FnStream};
    ///
    /// let counts = FnStream::new(2, |shard| Ok((0..3).map(move |i| Ok(shard * 10 + i))));
    /// let loader = DataLoader::stream(counts).batch_size(4).collate(|samples: Vec<usize>| Ok(samples)).build()?;
    /// assert_eq!(loader.iter().next().unwrap()?, [0, 10, 1, 11]);
    /// # Ok::<(), overdrive_dataload::DataError>(())
    /// ```
    pub fn stream<D: IterableDataset>(dataset: D) -> DataLoaderBuilder<FromStream<D>> {
        DataLoaderBuilder::new(FromStream::new(dataset))
    }
}

impl<B: Send + 'static> DataLoader<B> {
    pub(crate) fn new(source: Arc<dyn Source<B>>, machinery: Machinery<B>) -> Self {
        let Machinery { conduct, tuner, bytes, counters, faults, keep: _ } = machinery;
        Self {
            source,
            conduct,
            tuner: Arc::new(Mutex::new(tuner)),
            bytes,
            counters,
            faults,
            next_epoch: AtomicU64::new(0),
            current: Mutex::default(),
            resume: Mutex::default(),
        }
    }

    /// The next epoch: 0 at first, one more with each call, unless [`set_epoch`](Self::set_epoch) says otherwise.
    pub fn iter(&self) -> Epoch<B> {
        self.epoch(self.next_epoch.fetch_add(1, Relaxed))
    }

    /// The epoch with this number; which one [`iter`](Self::iter) gives next is not affected.
    ///
    /// Workers start at once, see [`Epoch`]. After `load_state_dict`, the epoch that was put back goes on where it was
    /// if it is the first that begins; any other one leaves that place behind. Of a stream, the number behind that of the epoch
    /// begun last goes on where that one is.
    pub fn epoch(&self, epoch: u64) -> Epoch<B> {
        let asked = Instant::now();
        // Whatever epoch begins, a position that was put back has had its use.
        let resumed = lock(&self.resume).take();
        let next = resumed.or_else(|| lock(&self.current).as_ref().map(|progress| lock(progress).following()));
        let position = next.filter(|next| next.epoch == epoch).unwrap_or_else(|| Position::start_of(epoch));
        let tuning = Tuning { tuner: self.tuner.clone(), bytes: self.bytes };
        let work = self.source.begin(&position);
        let (batches, conduct) = (self.source.batches(), self.conduct.clone());
        let progress = EpochProgress::new(position, self.source.bounds().lanes);
        let epoch = Epoch::start(work, progress, batches, conduct, tuning, self.counters.clone());
        *lock(&self.current) = Some(epoch.progress_of().clone());
        self.counters.waited(asked.elapsed());
        epoch
    }
}

impl<B> DataLoader<B> {
    /// Makes `epoch` the one that [`iter`](Self::iter) gives next.
    pub fn set_epoch(&self, epoch: u64) {
        self.next_epoch.store(epoch, Relaxed);
    }

    /// The epoch that [`iter`](Self::iter) gives next.
    pub fn next_epoch(&self) -> u64 {
        self.next_epoch.load(Relaxed)
    }

    /// How many batches an epoch has; none for a stream whose end is not known beforehand.
    pub fn len(&self) -> Option<usize> {
        self.source.batches()
    }

    /// How many samples the dataset has; none for a stream.
    pub fn dataset_len(&self) -> Option<usize> {
        let identity = self.source.identity();
        (!identity.stream).then_some(identity.len)
    }

    /// Whether an epoch is known to have no batch at all.
    pub fn is_empty(&self) -> bool {
        self.len() == Some(0)
    }

    /// What the loader did in all epochs since the start or the last [`reset_stats`](Self::reset_stats).
    pub fn stats(&self) -> LoaderStats {
        self.counters.snapshot()
    }

    /// The bad samples that were left out or replaced since then, the latest thousand.
    pub fn faults(&self) -> Vec<Fault> {
        self.faults.latest()
    }

    /// Sets the statistics to zero and forgets the faults.
    pub fn reset_stats(&self) {
        self.counters.reset();
        self.faults.clear();
    }
}

impl<B> DataLoader<B> {
    fn order(&self, epoch: u64) -> Result<Option<u32>, StateError> {
        self.source.order(epoch).map_err(|error| StateError::Mismatch {
            key: "order".to_owned(),
            expected: "an order of the sampler".to_owned(),
            found: error.to_string(),
        })
    }
}

impl<B> Stateful for DataLoader<B> {
    /// The batches of the epoch begun last that the training loop has had. Once that epoch was dropped, a stream's state is
    /// that of the next one, which goes on there.
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let position = match (&*lock(&self.resume), &*lock(&self.current)) {
            (Some(position), _) => position.clone(),
            (None, Some(progress)) => lock(progress).trained().clone(),
            (None, None) => Position::start_of(self.next_epoch()),
        };
        Ok(position.save(&self.source.identity(), self.order(position.epoch)?))
    }

    /// Makes the next [`iter`](DataLoader::iter) go on where the state was taken.
    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let order = |epoch| self.order(epoch);
        let position = Position::load(state, &self.source.identity(), &self.source.bounds(), order)?;
        self.next_epoch.store(position.epoch, Relaxed);
        *lock(&self.resume) = Some(position);
        // What was going on here is of another run.
        *lock(&self.current) = None;
        Ok(())
    }
}

impl<B: Send + 'static> IntoIterator for &DataLoader<B> {
    type Item = Result<B, crate::DataError>;
    type IntoIter = Epoch<B>;

    fn into_iter(self) -> Epoch<B> {
        self.iter()
    }
}

impl<B: Send + 'static> IntoIterator for &mut DataLoader<B> {
    type Item = Result<B, crate::DataError>;
    type IntoIter = Epoch<B>;

    fn into_iter(self) -> Epoch<B> {
        self.iter()
    }
}

impl<B> fmt::Debug for DataLoader<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DataLoader")
            .field("batches", &self.len())
            .field("size", &lock(&self.tuner).size())
            .field("next_epoch", &self.next_epoch)
            .finish_non_exhaustive()
    }
}
