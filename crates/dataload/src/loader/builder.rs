//! The options that loaders over datasets and over streams share, with PyTorch's names and meaning.

use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

use tch::Device;

use crate::loader::budget::{Allowance, DEVICE_BYTES, host_bytes, usual_footprint};
use crate::loader::fault::{FaultLog, OnError};
use crate::loader::num_workers::{Auto, MAX_WORKERS, NumWorkers};
use crate::loader::stages::Stages;
use crate::loader::stats::Counters;
use crate::loader::thread::WorkerInit;
use crate::loader::transfer::{TensorOps, Transfer};
use crate::loader::tuner::{Limits, Tuner};
use crate::loader::turns::ComputeThreads;
use crate::loader::worker::WorkerOptions;
use crate::tensor_batch::Footprint;
use crate::{Collate, DataError, Stack, TensorBatch};

/// The budget of batches loaded ahead where the loader chooses their number, unless set: 512 MiB.
const MEMORY_BUDGET: usize = 512 << 20;

/// Favours the training thread: where training and workers competed for the two cores of a machine, training ran a
/// tenth faster.
const WORKER_NICE: i32 = 10;

/// Where a loader's samples come from: [`FromDataset`](crate::FromDataset), [`FromStream`](crate::FromStream) or
/// `FromParquet`.
pub trait SampleSource {
    /// The samples that the collate function gets.
    type Sample;
}

/// Collects the options of a [`DataLoader`](crate::DataLoader); made by
/// [`DataLoader::builder`](crate::DataLoader::builder) and [`DataLoader::stream`](crate::DataLoader::stream).
#[must_use = "call build() to get the loader"]
pub struct DataLoaderBuilder<S, C = Stack> {
    pub(crate) source: S,
    pub(crate) collate: C,
    pub(crate) options: Options,
}

pub(crate) struct Options {
    pub(crate) batch_size: Option<usize>,
    pub(crate) shuffle: bool,
    pub(crate) drop_last: bool,
    pub(crate) seed: u64,
    pub(crate) on_error: OnError,
    num_workers: NumWorkers,
    prefetch_factor: usize,
    tune_prefetch: bool,
    pub(crate) memory_budget: Option<usize>,
    device_budget: usize,
    in_order: bool,
    timeout: Option<Duration>,
    worker_init_fn: Option<WorkerInit>,
    worker_nice: i32,
    compute_threads: Option<ComputeThreads>,
    pin_memory: bool,
    device: Option<Device>,
    keep_on_device: bool,
    /// How many threads read ahead for a loader without workers.
    pub(crate) readers: usize,
    /// The batch type's [`TensorOps`], where an option needs it.
    tensor_ops: Option<Box<dyn Any + Send + Sync>>,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            batch_size: None,
            shuffle: false,
            drop_last: false,
            seed: overdrive_core::base_seed(),
            on_error: OnError::Fail,
            num_workers: NumWorkers::Fixed(0),
            prefetch_factor: 2,
            tune_prefetch: false,
            memory_budget: None,
            device_budget: DEVICE_BYTES,
            in_order: true,
            timeout: None,
            worker_init_fn: None,
            worker_nice: WORKER_NICE,
            compute_threads: None,
            pin_memory: false,
            device: None,
            keep_on_device: false,
            readers: 0,
            tensor_ops: None,
        }
    }
}

impl<S: SampleSource> DataLoaderBuilder<S> {
    pub(crate) fn new(source: S) -> Self {
        Self { source, collate: Stack, options: Options::default() }
    }
}

impl<S: SampleSource, C> DataLoaderBuilder<S, C> {
    /// Samples per batch; 1 unless set.
    pub fn batch_size(mut self, batch_size: usize) -> Self {
        self.options.batch_size = Some(batch_size);
        self
    }

    /// Whether every epoch has a new random order; off unless set. A dataset is permuted as a whole, see
    /// [`RandomSampler`](crate::RandomSampler); a stream permutes only its shards, see
    /// [`shuffle_buffer`](DataLoaderBuilder::shuffle_buffer).
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.options.shuffle = shuffle;
        self
    }

    /// Threads that load in the background; 0, the default, loads on the calling thread. With [`Auto`], the loader
    /// chooses the number during the first batches, and tries again where the training loop waits later.
    pub fn num_workers(mut self, num_workers: impl Into<NumWorkers>) -> Self {
        self.options.num_workers = num_workers.into();
        self
    }

    /// How many batches per worker may be loaded ahead; 2 unless set, without effect when there is no worker.
    pub fn prefetch_factor(mut self, prefetch_factor: usize) -> Self {
        self.options.prefetch_factor = prefetch_factor;
        self
    }

    /// How many bytes of the host's memory the batches may take that workers are making and those that wait to be
    /// taken; one batch is made in any case. How large batches are is known from the first one of an epoch on: before that,
    /// each worker makes one. Unless set, a quarter of the memory that the process may use, divided by the ranks on the
    /// host, and 512 MiB for the batches loaded ahead where the loader chooses their number ([`Auto`]).
    ///
    /// The samples that a batch is made of count too, since a batch has to be whole: a collate function that takes a
    /// vector, as [`Stack`] does, has all N samples of S bytes in memory besides the batch, and W workers W times that. So only
    /// as many workers make a batch at a time as there is room for. An [`ImagePipeline`](crate::ImagePipeline) reads and
    /// decodes one image after the other, of which one counts. How large a dataset's samples are says
    /// [`sample_bytes`](DataLoaderBuilder::sample_bytes); a stream's formats know it. If set, the budget bounds one batch of a
    /// stream as well: more bytes of raw samples are an error.
    ///
    /// The bytes of a tensor, of a pair, a triple, a vector or a map by name of tensors, of a vector of strings, alone and
    /// beside a tensor, of lists ([`Ragged`](crate::Ragged)) and of a [`Table`](crate::Table) are known, and so are those of
    /// images with boxes and what belongs to these, alone and with captions. Batches of other types are counted only with
    /// [`prefetch`](Self::prefetch), [`to_device`](Self::to_device) or [`pin_memory`](Self::pin_memory); without these,
    /// `prefetch_factor` alone bounds them.
    pub fn memory_budget(mut self, bytes: usize) -> Self {
        self.options.memory_budget = Some(bytes);
        self
    }

    /// The same for the memory of the device that batches are copied to; 4 GiB unless set.
    pub fn device_budget(mut self, bytes: usize) -> Self {
        self.options.device_budget = bytes;
        self
    }

    /// Whether an incomplete last batch is dropped; off unless set.
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.options.drop_last = drop_last;
        self
    }

    /// The seed of everything random in the loader; unless set, that of
    /// [`seed_everything`](overdrive_core::seed_everything), and 0 where that was not called.
    pub fn seed(mut self, seed: u64) -> Self {
        self.options.seed = seed;
        self
    }

    /// What happens to bad samples; an error that ends the epoch unless set.
    pub fn on_error(mut self, on_error: OnError) -> Self {
        self.options.on_error = on_error;
        self
    }

    /// Whether batches are delivered in the order of the epoch; on unless set. If off, each batch is delivered as soon
    /// as it is made: a slow batch delays no other, and the order depends on timing.
    pub fn in_order(mut self, in_order: bool) -> Self {
        self.options.in_order = in_order;
        self
    }

    /// How long to wait for a batch; without limit unless set. After that time the epoch ends with
    /// [`DataError::Timeout`], and its threads, which may be stuck, are detached instead of joined.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.options.timeout = Some(timeout);
        self
    }

    /// A function that every worker calls with its number before its first batch, in each epoch.
    pub fn worker_init_fn(mut self, init: impl Fn(usize) -> Result<(), DataError> + Send + Sync + 'static) -> Self {
        self.options.worker_init_fn = Some(Arc::new(init));
        self
    }

    /// The workers' `nice` value, 0 to 19; 10 unless set. Where there are fewer cores than threads, a higher value
    /// gives the training thread more of their time; at 0 all compete on equal terms. Linux only, elsewhere without
    /// effect.
    pub fn worker_nice(mut self, nice: i32) -> Self {
        self.options.worker_nice = nice;
        self
    }

    /// Sets with how many threads libtorch computes while workers make batches, and while they rest; unless set, the
    /// loader leaves it alone.
    ///
    /// For training on a CPU whose cores the workers need too: an operator whose threads share a core with a worker waits
    /// for the slowest of them. With this option, workers make all batches ahead, then rest until one is left, and so on.
    /// Where they need less than a step for a batch, libtorch has all cores meanwhile. Where they need more, they seldom
    /// rest, and most steps have `beside_workers`. A larger [`prefetch_factor`](Self::prefetch_factor) makes longer
    /// turns.
    ///
    /// `next` calls `torch.set_num_threads` for the step that begins, in the thread that calls it; threads that start
    /// later compute with that number too. After the epoch it stays at `alone`, unless the epoch is dropped in another
    /// thread. A step's sums are split by the number of threads, and which steps have which number depends on time: runs
    /// with equal seeds are close but not equal. A compiled step keeps the number that it was compiled with.
    ///
    /// Of the batches ahead only one is left when workers begin again, so that a slow batch is waited for sooner. Workers do
    /// not rest where [`memory_budget`](Self::memory_budget) has no room for all batches ahead; and libtorch
    /// has `alone` threads also while they decode a Parquet file's next row groups.
    pub fn compute_threads(mut self, threads: ComputeThreads) -> Self {
        self.options.compute_threads = Some(threads);
        self
    }

    /// The function that turns samples into a batch; [`Stack`] unless set. Call it before
    /// [`pin_memory`](Self::pin_memory), [`to_device`](Self::to_device) and [`prefetch`](Self::prefetch).
    #[doc(alias = "collate_fn")]
    pub fn collate<N: Collate<S::Sample>>(self, collate: N) -> DataLoaderBuilder<S, N> {
        DataLoaderBuilder { source: self.source, collate, options: self.options }
    }
}

impl<S, C> DataLoaderBuilder<S, C>
where
    S: SampleSource,
    C: Collate<S::Sample>,
    C::Batch: TensorBatch + 'static,
{
    /// Whether batches are put into pinned (page-locked) memory, from which copies to a GPU overlap with its
    /// computation; off unless set. Without a CUDA device this only logs a warning, as in PyTorch.
    ///
    /// libtorch pins memory for a GPU that the process uses already, and begins to use GPU 0 if there is none. In a rank
    /// of another GPU, use [`to_device`](Self::to_device), which says which one, or put the model there before.
    pub fn pin_memory(mut self, pin_memory: bool) -> Self {
        self.options.pin_memory = pin_memory;
        self.with_tensor_ops()
    }

    /// Copies every batch to `device` while the training loop works on earlier ones. On CUDA the copy uses pinned
    /// memory and a separate stream; the training loop's stream waits for the copy, its thread does not.
    ///
    /// A batch's memory on a GPU is used again when the batch is dropped: copies then wait for what the training loop's
    /// stream was given until then. So the batches take the memory of those loaded ahead and two more, however far the
    /// loop is ahead of the GPU. That of the last batch stays with the loader until its next one: `empty_cache` does not
    /// free it. A loop that uses a batch on another stream as well has to join it with its own before it
    /// drops the batch. The pinned memory of copies that wait is more with each step that the loop is ahead, as in
    /// PyTorch.
    ///
    /// A GPU that fails for good ends the epoch with an error. libtorch ends the process, as it does under Python, if a
    /// batch is freed after that whose copy was under way.
    pub fn to_device(mut self, device: Device) -> Self {
        self.options.device = Some(device);
        self.with_tensor_ops()
    }

    /// Raises the prefetch factor for as long as that makes the training loop faster, within
    /// [`memory_budget`](Self::memory_budget).
    pub fn prefetch(mut self, _: Auto) -> Self {
        self.options.tune_prefetch = true;
        self.with_tensor_ops()
    }

    /// Keeps the batches' samples on the device that they were copied to.
    pub(crate) fn keep_on_device(mut self) -> Self {
        self.options.keep_on_device = true;
        self.with_tensor_ops()
    }

    fn with_tensor_ops(mut self) -> Self {
        self.options.tensor_ops = Some(Box::new(TensorOps::<C::Batch>::new()));
        self
    }
}

/// The parts of a loader that do not depend on its source.
pub(crate) struct Machinery<B> {
    /// Where finished samples are kept, with `cache(OnDevice)`.
    pub(crate) keep: Option<(TensorOps<B>, Device)>,
    pub(crate) worker_options: WorkerOptions,
    pub(crate) tuner: Tuner,
    pub(crate) measure: Option<fn(&B) -> Footprint>,
    pub(crate) allowance: Option<Allowance<B>>,
    pub(crate) counters: Arc<Counters>,
    pub(crate) faults: Arc<FaultLog>,
}

impl Options {
    /// The bytes of the host's memory that batches may take.
    pub(crate) fn host_budget(&self) -> usize {
        self.memory_budget.unwrap_or_else(host_bytes)
    }

    /// Checks the options that do not depend on the source, and makes the parts that they set up.
    pub(crate) fn assemble<C, B: 'static>(self, collate: C) -> Result<(Stages<C, B>, Machinery<B>), DataError> {
        let budget = Footprint { host: self.host_budget(), device: self.device_budget };
        let (min, max) = self.num_workers.bounds();
        DataError::at_least_1("prefetch_factor", self.prefetch_factor)?;
        if max > MAX_WORKERS {
            return Err(DataError::option("num_workers", format!("at most {MAX_WORKERS}"), max));
        }
        if self.timeout.is_some() && max == 0 {
            return Err(DataError::option("timeout", "at least one worker", "num_workers(0)"));
        }
        if self.timeout == Some(Duration::ZERO) {
            return Err(DataError::option("timeout", "more than 0", 0));
        }
        if !(0..=19).contains(&self.worker_nice) {
            return Err(DataError::option("worker_nice", "0 to 19", self.worker_nice));
        }
        if let Some(threads) = self.compute_threads {
            let is_fixed = self.num_workers != NumWorkers::Auto && !self.tune_prefetch;
            threads.check(is_fixed.then_some(max.saturating_mul(self.prefetch_factor)))?;
        }
        let ops = match self.tensor_ops.map(|ops| ops.downcast::<TensorOps<B>>()) {
            None => None,
            Some(Ok(ops)) => Some(*ops),
            Some(Err(_)) => {
                let expected = "a call before pin_memory, to_device and prefetch";
                return Err(DataError::option("collate", expected, "one after them"));
            }
        };
        let to_cuda = matches!(self.device, Some(Device::Cuda(_)));
        // Batches for a GPU are decoded straight into pinned memory.
        let pinned = (self.pin_memory || to_cuda) && pinning_is_possible();
        let transfer = match ops {
            None => None,
            Some(ops) => Transfer::new(ops, pinned, self.device)?,
        };
        let (counters, faults): (Arc<Counters>, Arc<FaultLog>) = Default::default();
        let limits = Limits {
            max_workers: max,
            tune_workers: self.num_workers == NumWorkers::Auto,
            tune_prefetch: self.tune_prefetch && max > 0,
            memory_budget: match self.tune_prefetch || self.num_workers == NumWorkers::Auto {
                true => self.memory_budget.unwrap_or(MEMORY_BUDGET),
                false => usize::MAX,
            },
            counts_bytes: ops.is_some() && (self.tune_prefetch || self.num_workers == NumWorkers::Auto),
        };
        let tuner = Tuner::new(limits, min, self.prefetch_factor);
        let stages = Stages {
            collate,
            transfer,
            pinned,
            on_error: self.on_error,
            counters: counters.clone(),
            faults: faults.clone(),
        };
        let worker_options = WorkerOptions {
            in_order: self.in_order,
            timeout: self.timeout,
            init: self.worker_init_fn,
            nice: self.worker_nice,
            compute_threads: self.compute_threads,
            readers: self.readers,
            counters: counters.clone(),
        };
        let keep = ops.zip(self.device).filter(|_| self.keep_on_device);
        let measure = ops.map(|ops| ops.footprint);
        let allowance = measure.or_else(usual_footprint).map(|footprint| Allowance { footprint, limits: budget });
        Ok((stages, Machinery { keep, worker_options, tuner, measure, allowance, counters, faults }))
    }
}

fn pinning_is_possible() -> bool {
    let possible = tch::Cuda::is_available();
    if !possible {
        tracing::warn!("pin_memory: no CUDA device was found, batches stay in pageable memory");
    }
    possible
}
