//! The loader: what to load, in which order, on how many threads.

mod ahead;
mod budget;
mod builder;
mod epoch;
mod fault;
mod from_dataset;
mod from_stream;
mod guard;
mod indexed;
mod indexed_feed;
mod lane;
mod mailbox;
mod merge;
mod num_workers;
mod numbering;
mod order;
mod other_ranks;
mod position;
#[cfg(feature = "progress")]
mod progress;
mod ranges;
mod readers;
mod reorder;
mod serve;
mod shared;
mod stages;
mod stats;
mod stream_feed;
mod streamed;
mod thread;
mod torch_order;
mod transfer;
mod tuner;
mod turns;
mod work;
mod worker;

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::Instant;

use overdrive_core::{Shard, ShardedBy, StateDict, StateError, Stateful};

pub use builder::{DataLoaderBuilder, SampleSource};
pub use epoch::Epoch;
pub(crate) use epoch::lock;
pub use fault::{Fault, OnError};
pub use from_dataset::FromDataset;
pub(crate) use from_dataset::MAX_ORDER;
#[cfg(feature = "parquet")]
pub(crate) use from_dataset::check_order;
pub use from_stream::FromStream;
pub(crate) use from_stream::{fingerprint, names};
#[cfg(feature = "parquet")]
pub(crate) use indexed::{Indexed, Open};
pub use num_workers::{Auto, NumWorkers};
pub(crate) use order::draw;
#[cfg(all(test, feature = "parquet"))]
pub(crate) use other_ranks::Earlier;
#[cfg(feature = "parquet")]
pub(crate) use other_ranks::RankBatches;
#[cfg(feature = "parquet")]
pub(crate) use position::Identity;
pub(crate) use position::Position;
#[cfg(feature = "progress")]
pub use progress::Progress;
pub use stats::LoaderStats;
pub(crate) use transfer::TensorOps;
pub use turns::ComputeThreads;
#[cfg(feature = "parquet")]
pub(crate) use {num_workers::MAX_WORKERS, work::Lookup};

use crate::tensor_batch::Footprint;
use crate::{Dataset, IterableDataset};
use budget::Allowance;
use builder::Machinery;
use epoch::{SharedPosition, Tuning};
use fault::FaultLog;
use position::{EpochPosition, LaneBounds};
use stats::Counters;
use tuner::Tuner;
use work::BatchSource;
use worker::WorkerOptions;

/// Batches of a dataset or a stream, made ahead of time on background threads.
///
/// Every iteration is a new epoch. The batches of an epoch depend on the seed and on the epoch's number, not on the
/// number of workers, nor on timing.
///
/// A stream is not read from its start in every epoch. After an epoch that ended early, by a `break`, by `take` or
/// because `batches_per_epoch` were reached, the epoch with the next number continues with the rest, so that short
/// epochs reach the end of every shard; after the end of the stream, the shards follow in a new order. An epoch with
/// any other number, asked for by [`epoch`](Self::epoch) or [`set_epoch`](Self::set_epoch), begins at the start of the
/// pass with its number: the same batches each time.
///
/// As a [`Stateful`], a loader saves which batches the training loop has had: the next iteration after
/// `load_state_dict` continues after them. The state fits any number of workers and, at the same global batch, another
/// number of ranks (for a stream, see [`merge_states`](DataLoader::merge_states), which a checkpoint of each rank does by
/// itself); it is refused where the data's length, batch size or seed differ. It takes less than a kilobyte; with `in_order(false)` a few bytes more for each
/// late batch.
///
/// # Syncs
/// Asking for a batch blocks until it is loaded, but never waits for a device.
///
/// # Source
/// `torch.utils.data.DataLoader`; the state is that of `torchdata.stateful_dataloader.StatefulDataLoader`.
pub struct DataLoader<B> {
    source: Arc<dyn BatchSource<B>>,
    worker_options: WorkerOptions,
    tuner: Arc<Mutex<Tuner>>,
    measure: Option<fn(&B) -> Footprint>,
    allowance: Option<Allowance<B>>,
    counters: Arc<Counters>,
    faults: Arc<FaultLog>,
    next_epoch: AtomicU64,
    /// The position of the epoch begun last.
    current: Mutex<Option<SharedPosition>>,
    /// Where to continue after a state was loaded.
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
    // On `DataLoader<()>`, since the builder determines the loader's batch type.
    pub fn builder<D: Dataset>(dataset: D) -> DataLoaderBuilder<FromDataset<D>> {
        DataLoaderBuilder::new(FromDataset::new(dataset))
    }

    /// The same for a stream of shards: batches of 1, four shards interleaved, not shuffled, on the calling thread.
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
    pub(crate) fn new(source: Arc<dyn BatchSource<B>>, machinery: Machinery<B>) -> Self {
        let Machinery { worker_options, tuner, measure, allowance, counters, faults, keep: _ } = machinery;
        Self {
            source,
            worker_options,
            tuner: Arc::new(Mutex::new(tuner)),
            measure,
            allowance,
            counters,
            faults,
            next_epoch: AtomicU64::new(0),
            current: Mutex::default(),
            resume: Mutex::default(),
        }
    }

    /// Starts the next epoch: number 0 at first, one more with each call, or the number given to
    /// [`set_epoch`](Self::set_epoch).
    pub fn iter(&self) -> Epoch<B> {
        self.epoch(self.next_epoch.fetch_add(1, Relaxed))
    }

    /// Starts the epoch with this number; the number that [`iter`](Self::iter) uses next does not change.
    ///
    /// Workers start at once, see [`Epoch`]. After `load_state_dict`, the first epoch that starts continues at the
    /// saved place if it has the saved number; otherwise the saved place is discarded. With a stream, the epoch whose
    /// number follows that of the latest epoch continues where that one is.
    pub fn epoch(&self, epoch: u64) -> Epoch<B> {
        let asked = Instant::now();
        // The loaded position is used up by the next epoch, whatever its number.
        let resumed = lock(&self.resume).take();
        let next = resumed.or_else(|| lock(&self.current).as_ref().map(|running| lock(running).following()));
        self.start(next.filter(|next| next.epoch == epoch).unwrap_or_else(|| Position::start_of(epoch)), asked)
    }

    /// Starts an epoch of a dataset at batch `number`.
    #[cfg(feature = "parquet")]
    pub(crate) fn epoch_from(&self, epoch: u64, number: usize) -> Epoch<B> {
        self.start(Position { batch: number, ..Position::start_of(epoch) }, Instant::now())
    }

    fn start(&self, mut position: Position, asked: Instant) -> Epoch<B> {
        let tuning = Tuning { tuner: self.tuner.clone(), measure: self.measure, allowance: self.allowance };
        let work = self.source.begin(&mut position);
        let (batches, worker_options) = (self.source.batches(&position), self.worker_options.clone());
        let position = EpochPosition::new(position, self.source.bounds().lanes);
        let epoch = Epoch::start(work, position, batches, worker_options, tuning, self.counters.clone());
        *lock(&self.current) = Some(epoch.position_of().clone());
        self.counters.waited(asked.elapsed());
        epoch
    }
}

impl<B> DataLoader<B> {
    /// Sets the number of the epoch that [`iter`](Self::iter) starts next.
    pub fn set_epoch(&self, epoch: u64) {
        self.next_epoch.store(epoch, Relaxed);
    }

    /// The number of the epoch that [`iter`](Self::iter) starts next.
    pub fn next_epoch(&self) -> u64 {
        self.next_epoch.load(Relaxed)
    }

    /// How many batches an epoch has; `None` for a stream without `batches_per_epoch`.
    pub fn len(&self) -> Option<usize> {
        self.source.batches(&Position::default())
    }

    /// How many samples the dataset has; `None` for a stream.
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

    /// The latest thousand bad samples that were skipped or replaced since then.
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
    /// Which part of all ranks' lanes this one has, where several ranks share a stream.
    fn shard(&self) -> Option<Shard> {
        let LaneBounds { all, own, .. } = self.source.bounds().lanes?;
        let (rank, ranks) = (*own.first()?, all / own.len());
        (ranks > 1).then_some(Shard { rank, ranks, by: ShardedBy::Tensors })
    }

    fn order(&self, epoch: u64) -> Result<Option<u32>, StateError> {
        self.source.order(epoch).map_err(|error| StateError::Mismatch {
            key: "order".to_owned(),
            expected: "an order of the sampler".to_owned(),
            found: error.to_string(),
        })
    }
}

impl<B> Stateful for DataLoader<B> {
    /// The batches of the latest epoch that the training loop has had. Once that epoch was dropped, a stream's state is
    /// that of the next one, which continues there.
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut position = match (&*lock(&self.resume), &*lock(&self.current)) {
            (Some(position), _) => position.clone(),
            (None, Some(running)) => lock(running).trained().clone(),
            (None, None) => Position::start_of(self.next_epoch()),
        };
        position.generator = position.generator.or_else(|| self.source.generator());
        let saved = position.save(&self.source.identity(), &self.source.bounds(), self.order(position.epoch)?)?;
        let Some(shard) = self.shard() else { return Ok(saved) };
        let mut state = StateDict::of_shard(shard);
        saved.into_iter().for_each(|(key, entry)| state.insert(key, entry));
        Ok(state)
    }

    /// Makes the next [`iter`](DataLoader::iter) continue where the state was taken.
    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let order = |epoch| self.order(epoch);
        let position = Position::load(state, &self.source.identity(), &self.source.bounds(), order)?;
        self.next_epoch.store(position.epoch, Relaxed);
        *lock(&self.resume) = Some(position);
        // The epoch that ran here before belongs to another run.
        *lock(&self.current) = None;
        Ok(())
    }

    /// True of a stream that several ranks share: each rank's state has the lanes of its own, and those of all ranks
    /// together are one.
    fn differs_by_rank(&self) -> bool {
        self.shard().is_some()
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
