//! How each technique gets its batches. The order is the same for all.

use anyhow::Result;
use overdrive::dataload::{Cached, DataError, DataLoader, Epoch, ImageFolder, Mnist, RandomSampler, Sampler, ToFloat};
use overdrive_bench_report::Technique;
use tch::{Device, Kind, Tensor};

use crate::job::Job;

/// MNIST's mean and standard deviation on the scale from 0 to 1.
pub const MEAN: f32 = 0.1307;
/// See [`MEAN`].
pub const STD: f32 = 0.3081;

/// Images, float32 and normalised, and labels.
pub type Batch = (Tensor, Tensor);

/// A source of batches for any number of epochs.
pub enum Feed {
    /// Files, read and decoded by the training thread every epoch, or once and then kept.
    Loader(DataLoader<Batch>),
    /// Everything in one tensor, on the host or on the device.
    OneTensor(OneTensor),
}

impl Feed {
    /// What the technique reads from.
    ///
    /// # Errors
    /// When the data cannot be read.
    pub fn open(job: &Job, device: Device) -> Result<Self> {
        let (technique, micro_batch) = (job.technique, job.micro_batch());
        if technique.needs_one_tensor() {
            let device = if technique == Technique::DeviceData { device } else { Device::Cpu };
            return Ok(Self::OneTensor(OneTensor::open(job, device)?));
        }
        let folder = ImageFolder::open(&job.png)?;
        let collate = ToFloat::new(&[MEAN], &[STD])?;
        let seed = u64::from(job.seed);
        Ok(match technique {
            Technique::Cache | Technique::CachePrefetch | Technique::Combined => {
                let workers = usize::from(technique != Technique::Cache);
                let loader = DataLoader::builder(Cached::new(folder)).batch_size(micro_batch).shuffle(true).seed(seed);
                Self::Loader(loader.num_workers(workers).prefetch_factor(8).collate(collate).build()?)
            }
            _ => {
                let loader = DataLoader::builder(folder).batch_size(micro_batch).shuffle(true).seed(seed);
                Self::Loader(loader.collate(collate).build()?)
            }
        })
    }

    /// The batches of one epoch.
    pub fn epoch(&self, epoch: u64) -> Batches<'_> {
        match self {
            Self::Loader(loader) => Batches::Loader(Box::new(loader.epoch(epoch))),
            Self::OneTensor(data) => Batches::OneTensor(data.epoch(epoch)),
        }
    }
}

/// The batches of one epoch.
pub enum Batches<'a> {
    /// See [`Feed::Loader`].
    Loader(Box<Epoch<Batch>>),
    /// See [`Feed::OneTensor`].
    OneTensor(Slices<'a>),
}

impl Iterator for Batches<'_> {
    type Item = Result<Batch, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        match self {
            Self::Loader(epoch) => epoch.next(),
            Self::OneTensor(slices) => slices.next(),
        }
    }
}

/// A training set as one tensor, as `tch::vision::mnist` gives it.
pub struct OneTensor {
    images: Tensor,
    labels: Tensor,
    sampler: RandomSampler,
    batch_size: i64,
}

impl OneTensor {
    fn open(job: &Job, device: Device) -> Result<Self> {
        let train = Mnist::open(&job.idx)?.train;
        let (images, labels) = to_tensors(train.images(), train.labels(), job.train_images)?;
        // The order of an image folder: by class, then by number.
        let mut order: Vec<i64> = (0..job.train_images as i64).collect();
        order.sort_by_key(|&index| train.labels()[index as usize]);
        let order = Tensor::from_slice(&order);
        let images = images.f_index_select(0, &order)?.f_to_device(device)?;
        let labels = labels.f_index_select(0, &order)?.f_to_device(device)?;
        let sampler = RandomSampler::new(job.train_images, u64::from(job.seed));
        Ok(Self { images, labels, sampler, batch_size: job.micro_batch() as i64 })
    }

    fn epoch(&self, epoch: u64) -> Slices<'_> {
        let order: Vec<i64> = self.sampler.order(epoch).into_iter().map(|index| index as i64).collect();
        let order = Tensor::from_slice(&order).to_device(self.images.device());
        Slices { data: self, order, next: 0 }
    }
}

/// Slices of a [`OneTensor`] in an epoch's order.
pub struct Slices<'a> {
    data: &'a OneTensor,
    order: Tensor,
    next: i64,
}

impl Iterator for Slices<'_> {
    type Item = Result<Batch, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        let len = self.data.batch_size.min(self.order.size()[0] - self.next);
        if len <= 0 {
            return None;
        }
        let indices = self.order.narrow(0, self.next, len);
        self.next += len;
        let batch =
            || Ok((self.data.images.f_index_select(0, &indices)?, self.data.labels.f_index_select(0, &indices)?));
        Some(batch().map_err(DataError::Tensor))
    }
}

/// The first `count` images as normalised float32 `[count, 1, 28, 28]`, and their labels as int64.
///
/// # Errors
/// When memory runs out.
pub fn to_tensors(images: &[u8], labels: &[u8], count: usize) -> Result<Batch> {
    let images = Tensor::from_slice(images).f_view([-1, 1, 28, 28])?.f_narrow(0, 0, count as i64)?;
    let images = (images.f_to_kind(Kind::Float)? / 255.0 - f64::from(MEAN)) / f64::from(STD);
    let labels = Tensor::from_slice(labels).f_narrow(0, 0, count as i64)?.f_to_kind(Kind::Int64)?;
    Ok((images, labels))
}
