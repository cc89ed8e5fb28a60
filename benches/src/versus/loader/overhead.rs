//! Raw samples in memory, against dataloader-rs: the overhead of a loader when a sample costs only a copy.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Result, anyhow, ensure};
use dataloader_rs::collator::{Collator, VecCollator};
use overdrive::dataload::{
    BatchSamples, Collate, DataError, DataLoader, DataLoaderBuilder, Dataset, Drawn, FromDataset,
};
use overdrive::ffi::{BufferPool, HostBuffer};
use overdrive_bench_report::{Ratio, Target};
use tch::{Kind, Tensor};

use super::{Bench, WORKERS};
use crate::versus::turns::{Case, Turns};

const VIEWS: &str = "150 kB raw samples in memory, copied once, into one tensor a batch of 64, 2 workers";
const TENSORS: &str = "150 kB raw samples in memory, each copied, then into one tensor a batch of 64, 2 workers";
const LISTS: &str = "150 kB raw samples in memory, each copied, a list of them a batch of 64, 2 workers";
const PEER: &str = "dataloader-rs";
/// Bytes of a sample: an RGB image of 224x224 pixels.
const BYTES: usize = 3 * 224 * 224;
const SAMPLES: usize = 1024;
const BATCH_SIZE: usize = 64;
/// Epochs per measurement, which then takes some tenths of a second.
const EPOCHS: usize = 4;

/// All samples. Each loader reads a copy of a sample through its own `Dataset` trait.
#[derive(Clone)]
struct Raw(Arc<[u8]>);

impl Raw {
    fn sample(&self, index: usize) -> Vec<u8> {
        self.0[index * BYTES..][..BYTES].to_vec()
    }
}

impl Dataset for Raw {
    type Sample = Vec<u8>;

    fn len(&self) -> usize {
        SAMPLES
    }

    fn get(&self, index: usize) -> Result<Vec<u8>, DataError> {
        Ok(self.sample(index))
    }
}

/// The same samples as views, so that each is copied only once, into its batch.
#[derive(Clone)]
struct Views(Raw);

/// A view of one sample.
struct View {
    data: Arc<[u8]>,
    index: usize,
}

impl AsRef<[u8]> for View {
    fn as_ref(&self) -> &[u8] {
        &self.data[self.index * BYTES..][..BYTES]
    }
}

impl Dataset for Views {
    type Sample = View;

    fn len(&self) -> usize {
        SAMPLES
    }

    fn get(&self, index: usize) -> Result<View, DataError> {
        Ok(View { data: self.0.0.clone(), index })
    }
}

impl dataloader_rs::Dataset for Views {
    type Item = View;

    fn len(&self) -> usize {
        SAMPLES
    }

    fn get(&self, index: usize) -> dataloader_rs::error::Result<View> {
        Ok(View { data: self.0.0.clone(), index })
    }
}

impl dataloader_rs::Dataset for Raw {
    type Item = Vec<u8>;

    fn len(&self) -> usize {
        SAMPLES
    }

    fn get(&self, index: usize) -> dataloader_rs::error::Result<Vec<u8>> {
        Ok(self.sample(index))
    }
}

/// Copies the samples of a batch into one tensor, whose memory is that of earlier batches, as with `ImagePipeline`. The
/// peer has the same collator, so that its loader is compared and not the allocator.
#[derive(Default)]
struct Recycled(BufferPool);

struct Filled {
    buffer: HostBuffer,
    samples: usize,
}

impl Filled {
    fn new(buffer: HostBuffer) -> Self {
        Self { buffer, samples: 0 }
    }

    fn add(&mut self, sample: &[u8]) {
        self.buffer.as_mut_slice()[self.samples * BYTES..][..BYTES].copy_from_slice(sample);
        self.samples += 1;
    }

    fn tensor(self) -> Result<Tensor, DataError> {
        Ok(self.buffer.into_tensor(Kind::Uint8, &[self.samples as i64, 3, 224, 224])?)
    }
}

impl<S: AsRef<[u8]> + Send> Collate<S> for Recycled {
    type Batch = Tensor;

    fn collate(&self, samples: Vec<S>) -> Result<Tensor, DataError> {
        let mut filled = Filled::new(self.0.take(samples.len() * BYTES, false)?);
        samples.iter().for_each(|sample| filled.add(sample.as_ref()));
        filled.tensor()
    }

    /// Copies each sample as soon as it is read, while it is in the CPU's cache.
    fn collate_from(&self, samples: &mut BatchSamples<'_, S>) -> Result<Tensor, DataError> {
        let mut filled = Filled::new(self.0.take(samples.len() * BYTES, false)?);
        while let Some(Drawn { sample, .. }) = samples.next()? {
            filled.add(sample.as_ref());
        }
        filled.tensor()
    }
}

impl<S: AsRef<[u8]> + Send> Collator<S> for Recycled {
    type Batch = Tensor;

    fn collate(&self, samples: Vec<S>) -> dataloader_rs::error::Result<Tensor> {
        Ok(Collate::collate(self, samples)?)
    }
}

pub fn measure(bench: &mut Bench) -> Result<()> {
    let data = Raw((0..SAMPLES * BYTES).map(|position| (position * 31) as u8).collect());
    let views = Views(data.clone());
    let once = ours(&views).collate(Recycled::default()).build()?;
    let tensors = ours(&data).collate(Recycled::default()).build()?;
    let lists = ours(&data).collate(|samples: Vec<Vec<u8>>| Ok(samples)).build()?;
    let (mut their_once, mut their_tensors) = (theirs(&views, Recycled::default()), theirs(&data, Recycled::default()));
    let mut their_lists = theirs(&data, VecCollator);

    let rows = |batch: &Tensor| batch.size()[0] as usize;
    let mut turns = Turns::default();
    turns.ours("once", || rate(|| once.iter().try_fold(0, |seen, batch| Ok(seen + rows(&batch?)))));
    turns.ours("tensors", || rate(|| tensors.iter().try_fold(0, |seen, batch| Ok(seen + rows(&batch?)))));
    turns.ours("lists", || rate(|| lists.iter().try_fold(0, |seen, batch| Ok(seen + batch?.len()))));
    turns.ours("theirs once", || {
        rate(|| their_once.iter().try_fold(0, |seen, batch| Ok(seen + rows(&to_anyhow(batch)?))))
    });
    turns.ours("their tensors", || {
        rate(|| their_tensors.iter().try_fold(0, |seen, batch| Ok(seen + rows(&to_anyhow(batch)?))))
    });
    turns.ours("their lists", || {
        rate(|| their_lists.iter().try_fold(0, |seen, batch| Ok(seen + to_anyhow(batch)?.len())))
    });
    turns.take("overhead", bench.pairs)?;
    bench.versions.insert(PEER.to_owned(), "0.2.0".to_owned());
    let pairs =
        [(VIEWS, "once", "theirs once"), (TENSORS, "tensors", "their tensors"), (LISTS, "lists", "their lists")];
    for (text, ours, peer) in pairs {
        let case = Case { text, unit: "samples/s", ratio: Ratio::TimesFasterByRate };
        turns.compare(&mut bench.findings, case, (ours, peer), Some(Target::AtLeast(2.0)))?;
    }
    Ok(())
}

fn ours<D: Dataset + Clone>(data: &D) -> DataLoaderBuilder<FromDataset<D>> {
    DataLoader::builder(data.clone()).batch_size(BATCH_SIZE).shuffle(true).num_workers(WORKERS)
}

type Theirs<D, C> = dataloader_rs::DataLoader<D, dataloader_rs::RandomSampler, C>;

/// The peer's loader, with as many threads as ours, and at most as many batches ahead.
fn theirs<D: dataloader_rs::Dataset + Clone, C: Collator<D::Item>>(data: &D, collator: C) -> Theirs<D, C> {
    let builder = dataloader_rs::DataLoader::builder(data.clone()).batch_size(BATCH_SIZE).num_workers(WORKERS);
    builder.sampler(dataloader_rs::RandomSampler::new(0)).prefetch_depth(2).collator(collator).build()
}

fn to_anyhow<B>(batch: dataloader_rs::error::Result<B>) -> Result<B> {
    batch.map_err(|error| anyhow!("{error}"))
}

/// Samples per second.
fn rate(mut epoch: impl FnMut() -> Result<usize>) -> Result<f64> {
    let started = Instant::now();
    for _ in 0..EPOCHS {
        let seen = epoch()?;
        ensure!(seen == SAMPLES, "{seen} of {SAMPLES} samples");
    }
    Ok((EPOCHS * SAMPLES) as f64 / started.elapsed().as_secs_f64())
}
