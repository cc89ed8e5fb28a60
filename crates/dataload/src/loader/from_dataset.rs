//! Loaders over a dataset with random access.

use std::any::Any;
use std::sync::{Arc, Mutex};

use crate::cache::{CacheKind, DeviceStore};
use crate::loader::budget::Allowance;
use crate::loader::builder::{DataLoaderBuilder, SampleSource};
use crate::loader::indexed::{Indexed, Open};
use crate::loader::num_workers::MAX_WORKERS;
use crate::loader::position::Identity;
use crate::loader::readers::{ReaderOptions, Readers};
use crate::loader::torch_order::TorchOrder;
use crate::sample_bytes::{SampleBytes, usual_sample_bytes};
use crate::tensor_batch::Footprint;
use crate::{
    BatchSampler, Collate, DataError, DataLoader, Dataset, FixedBatches, Generator, RandomSampler, Sampler,
    SequentialSampler,
};

/// The most samples of an epoch. Its order is a list in memory, 32 GiB at this size; a larger allocation would abort
/// the process instead of returning an error.
pub(crate) const MAX_ORDER: usize = u32::MAX as usize;

/// A dataset and the order in which a loader reads it.
pub struct FromDataset<D> {
    dataset: D,
    sampler: Option<Box<dyn Sampler>>,
    batch_sampler: Option<Box<dyn BatchSampler>>,
    torch_order: Option<TorchOrder>,
    readers: usize,
    /// A `SampleBytes` of the dataset's samples.
    sample_bytes: Option<Box<dyn Any + Send + Sync>>,
}

impl<D> FromDataset<D> {
    pub(crate) fn new(dataset: D) -> Self {
        Self { dataset, sampler: None, batch_sampler: None, torch_order: None, readers: 0, sample_bytes: None }
    }
}

impl<D: Dataset> SampleSource for FromDataset<D> {
    type Sample = D::Sample;
}

impl<D: Dataset, C> DataLoaderBuilder<FromDataset<D>, C> {
    /// A custom order; excludes [`shuffle`](Self::shuffle).
    pub fn sampler(mut self, sampler: impl Sampler + 'static) -> Self {
        self.source.sampler = Some(Box::new(sampler));
        self
    }

    /// Custom batches; excludes [`batch_size`](Self::batch_size), [`shuffle`](Self::shuffle),
    /// [`sampler`](Self::sampler) and [`drop_last`](Self::drop_last).
    pub fn batch_sampler(mut self, batch_sampler: impl BatchSampler + 'static) -> Self {
        self.source.batch_sampler = Some(Box::new(batch_sampler));
        self
    }

    /// Sets how many threads only read samples ([`Dataset::get`]), ahead of the workers, which make batches of them; 0 unless
    /// set: workers read what they need themselves. For storage that answers late: with `readers(32)` and `num_workers(4)`, 32
    /// requests are under way while four threads decode images.
    ///
    /// They hold at most as many samples as two batches have, and one for each of them, and no more bytes of them than
    /// [`memory_budget`](Self::memory_budget), where their [bytes](Self::sample_bytes) are known, beside those that they are
    /// reading: at the start of an epoch that is one for each reader. Those of a batch that failed are let go with it. Batches, faults and errors are the same as without. They have the priority of workers and as few
    /// threads of libtorch's;
    /// [`worker_init_fn`](Self::worker_init_fn) is not called in them.
    ///
    /// ```no_run
    /// use overdrive_dataload::{DataLoader, ImageFolder, ImagePipeline, RandomResizedCrop};
    ///
    /// let photographs = DataLoader::builder(ImageFolder::open("/mnt/nfs/train")?).batch_size(256).shuffle(true);
    /// let pipeline = ImagePipeline::new(0).then(RandomResizedCrop::new(224));
    /// let loader = photographs.readers(32).num_workers(8).collate(pipeline).build()?;
    /// # Ok::<(), overdrive_dataload::DataError>(())
    /// ```
    pub fn readers(mut self, readers: usize) -> Self {
        self.source.readers = readers;
        self
    }

    /// Says how many bytes of memory a sample takes, so that [`memory_budget`](Self::memory_budget) bounds what is read of
    /// samples too. Known without are bytes, encoded and decoded images and tensors, alone or with a number, text or
    /// tensor beside them, and the samples of LMDB and MDS; any other counts as 0.
    ///
    /// ```
    /// use overdrive_dataload::{DataLoader, FnDataset};
    ///
    /// struct Clip { frames: Vec<Vec<u8>>, caption: String }
    ///
    /// let clips = FnDataset::new(100, |index| Ok(Clip { frames: vec![vec![0; 640 * 480]; 16], caption: index.to_string() }));
    /// let bytes = |clip: &Clip| clip.frames.iter().map(Vec::len).sum();
    /// let loader = DataLoader::builder(clips).batch_size(8).readers(4).sample_bytes(bytes).memory_budget(1 << 30);
    /// # let loader = loader.collate(|clips: Vec<Clip>| Ok(clips.into_iter().map(|it| it.caption).collect::<Vec<_>>()));
    /// # assert_eq!(loader.build()?.iter().next().unwrap()?.len(), 8);
    /// # Ok::<(), overdrive_dataload::DataError>(())
    /// ```
    pub fn sample_bytes(mut self, bytes: impl Fn(&D::Sample) -> usize + Send + Sync + 'static) -> Self
    where
        D: 'static,
    {
        let bytes: SampleBytes<D::Sample> = Arc::new(bytes);
        self.source.sample_bytes = Some(Box::new(bytes));
        self
    }

    /// Draws each epoch's order as PyTorch's loader does: from this generator, or with `None`, PyTorch's default, from
    /// libtorch's own. Without this option, the order is a function of the [`seed`](Self::seed) and the epoch's number.
    ///
    /// A program ported from PyTorch then sees the same batches in the same order, and libtorch's generator continues
    /// with the same numbers. Each epoch draws when it starts: the seed that PyTorch draws for its workers (even
    /// without shuffling: give the loaders for evaluation the option too), then what the sampler draws
    /// ([`RandomSampler`], [`SubsetRandomSampler`](crate::SubsetRandomSampler),
    /// [`WeightedRandomSampler`](crate::WeightedRandomSampler); others draw nothing, and keep their own order).
    ///
    /// The loader's state has 5 kB more, and a run resumed in the middle of an epoch sees the rest of its batches. With
    /// `None`, also save libtorch's generator (`RngState` of `overdrive-checkpoint`), from which later epochs are
    /// drawn.
    ///
    /// ```
    /// use overdrive_dataload::{DataLoader, FnDataset, Generator};
    ///
    /// let loader = DataLoader::builder(FnDataset::new(5, Ok)).batch_size(5).shuffle(true);
    /// let loader = loader.generator(Generator::manual_seed(0)).collate(|samples: Vec<usize>| Ok(samples)).build()?;
    /// // g = torch.Generator().manual_seed(0)
    /// // next(iter(DataLoader(range(5), batch_size=5, shuffle=True, generator=g)))
    /// assert_eq!(loader.iter().next().unwrap()?, [3, 1, 0, 4, 2]);
    /// # Ok::<(), overdrive_dataload::DataError>(())
    /// ```
    ///
    /// # Differences from PyTorch
    /// With a generator of its own, PyTorch's `RandomSampler` draws one permutation too many, at the end of an epoch.
    /// Here it draws it at the start, also for an epoch that ends early. PyTorch's samplers may have a generator
    /// besides the loader's; here they share one. `persistent_workers` draws the workers' seed only once.
    ///
    /// # Source
    /// `torch.utils.data.DataLoader(generator=..)`
    pub fn generator(mut self, generator: impl Into<Option<Generator>>) -> Self {
        self.source.torch_order = Some(TorchOrder::new(generator.into()));
        self
    }
}

impl<D, C> DataLoaderBuilder<FromDataset<D>, C> {
    /// Keeps samples for later epochs: [`Ram`](crate::Ram), [`Disk`](crate::Disk) or [`OnDevice`](crate::OnDevice).
    ///
    /// # Errors
    /// As [`DiskCached::open`](crate::DiskCached::open); the other kinds have no errors.
    pub fn cache<K: CacheKind<D, C>>(self, kind: K) -> Result<K::Builder, DataError> {
        kind.apply(self)
    }

    pub(crate) fn wrap_dataset<W>(
        self,
        wrap: impl FnOnce(D) -> Result<W, DataError>,
    ) -> Result<DataLoaderBuilder<FromDataset<W>, C>, DataError> {
        let FromDataset { dataset, sampler, batch_sampler, torch_order, readers, sample_bytes } = self.source;
        let dataset = wrap(dataset)?;
        let source = FromDataset { dataset, sampler, batch_sampler, torch_order, readers, sample_bytes };
        Ok(DataLoaderBuilder { source, collate: self.collate, options: self.options })
    }
}

impl<D, C> DataLoaderBuilder<FromDataset<D>, C>
where
    D: Dataset + 'static,
    C: Collate<D::Sample> + 'static,
{
    /// Makes the loader; no thread is started yet.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a `batch_size` or `prefetch_factor` of 0, more than 1024 workers, 2^32 or more
    /// samples per epoch, and options that exclude each other; [`DataError::Torch`] when the device is not available.
    pub fn build(self) -> Result<DataLoader<C::Batch>, DataError> {
        let Self { source, collate, options } = self;
        let FromDataset { dataset, sampler, batch_sampler, torch_order, readers, sample_bytes } = source;
        let own_batches = batch_sampler.is_some();
        let own_order = own_batches || sampler.is_some();
        if own_batches && (options.batch_size.is_some() || options.shuffle || sampler.is_some() || options.drop_last) {
            let expected = "no batch_size, shuffle, sampler or drop_last together with it";
            return Err(DataError::option("batch_sampler", expected, "one of them"));
        }
        if readers > MAX_WORKERS {
            return Err(DataError::option("readers", format!("at most {MAX_WORKERS}"), readers));
        }
        if options.shuffle && sampler.is_some() {
            return Err(DataError::option("sampler", "no shuffle together with it", "both"));
        }
        let (len, seed) = (dataset.len(), options.seed);
        let mut order = vec![("shuffle", i64::from(options.shuffle)), ("drop_last", i64::from(options.drop_last))];
        order.extend(torch_order.as_ref().map(|_| ("torch_order", 1)));
        let batch_sampler: Arc<dyn BatchSampler> = match batch_sampler {
            Some(batch_sampler) => Arc::from(batch_sampler),
            None => {
                let sampler = sampler.unwrap_or_else(|| match options.shuffle {
                    true => Box::new(RandomSampler::new(len, seed)),
                    false => Box::new(SequentialSampler::new(len)),
                });
                check_order(&sampler)?;
                Arc::new(FixedBatches::new(sampler, options.batch_size.unwrap_or(1), options.drop_last)?)
            }
        };
        let identity =
            Identity { stream: false, len, global_batch_size: batch_sampler.global_batch_size(), seed, order };
        let most_bytes = options.host_budget();
        let own_bytes = sample_bytes.and_then(|bytes| bytes.downcast::<SampleBytes<D::Sample>>().ok());
        let measure = own_bytes.map(|bytes| *bytes).or_else(usual_sample_bytes);
        let (stages, mut machinery) = options.assemble(collate)?;
        if measure.is_some() {
            // Where batches are not measured, their samples are.
            let limits = Footprint { host: most_bytes, device: 0 };
            machinery.allowance.get_or_insert(Allowance { footprint: |_| Footprint::default(), limits });
        }
        let store = machinery.keep.map(|(ops, device)| Arc::new(DeviceStore::new(ops, device, len)));
        let (dataset, stages) = (Arc::new(dataset), Arc::new(stages));
        if readers > 0 && store.is_some() {
            let expected = "0 with `OnDevice`, from which later epochs take their samples";
            return Err(DataError::option("readers", expected, readers));
        }
        if readers > 0 && !stages.collate.reads_samples() {
            let expected = "0 with `TensorDataset::loader`, which takes all rows of a batch at once";
            return Err(DataError::option("readers", expected, readers));
        }
        let (nice, counters) = (machinery.worker_options.nice, machinery.counters.clone());
        let options = ReaderOptions { count: readers, nice, counters, most_bytes };
        let open: Open<Readers<D>> = Box::new(move |position, plan| {
            let left = (position.batch..plan.len()).filter(|number| readers > 0 && !position.before.contains(number));
            let order: Vec<usize> = left.filter_map(|number| plan.batch(number)).flatten().copied().collect();
            let batch = plan.batch(position.batch).map_or(0, <[usize]>::len);
            Readers::start(dataset.clone(), &options, measure.clone(), 2 * batch + readers, order).map(Arc::new)
        });
        let known_order = Mutex::default();
        let shared = batch_sampler.world_size() > 1;
        let source = Indexed {
            open,
            stages,
            batch_sampler,
            identity,
            own_order,
            known_order,
            store,
            torch_order,
            shared,
            ranks: None,
        };
        Ok(DataLoader::new(Arc::new(source), machinery))
    }
}

/// Refuses an order that would take too much memory.
pub(crate) fn check_order(sampler: &impl Sampler) -> Result<(), DataError> {
    let samples = sampler.len().saturating_mul(sampler.world_size());
    if samples > MAX_ORDER {
        let expected = format!("at most {MAX_ORDER} samples an epoch, whose order is a list in memory");
        return Err(DataError::option("sampler", expected, samples));
    }
    Ok(())
}
