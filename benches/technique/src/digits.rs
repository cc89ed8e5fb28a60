//! The digits: a small CNN, and the sources of its batches.

use std::path::PathBuf;

use anyhow::{Context, Result};
use overdrive_bench_report::Contender;
use overdrive_dataload::{Cached, Color, DataError, DataLoader, ImageFolder, Mnist, RandomSampler, Sampler, ToFloat};
use tch::data::Iter2;
use tch::{Device, Kind, Tensor, nn};

use super::job::Job;
use super::trainer::{Batch, Batches, Feed, Model};
use crate::model::Cnn;

/// MNIST's mean and standard deviation on the scale from 0 to 1.
pub const MEAN: f32 = 0.1307;
/// See [`MEAN`].
pub const STD: f32 = 0.3081;

/// The CNN.
pub fn model(vs: &nn::Path<'_>) -> Result<Model> {
    let cnn = Cnn::new(vs);
    Ok(Box::new(move |images, _| cnn.forward(images)))
}

/// The source of batches for the job's techniques.
///
/// # Errors
/// When the data cannot be read.
pub fn feed(job: &Job, device: Device) -> Result<Box<dyn Feed>> {
    if job.has(Contender::DeviceData) {
        return Ok(Box::new(OneTensor::open(job, device)?));
    }
    let (cached, background) = (job.has(Contender::CachePrefetch), job.has(Contender::Prefetch));
    if !cached && !background {
        return Ok(Box::new(OneTensor::open(job, Device::Cpu)?));
    }
    let folder = ImageFolder::open(&job.train)?.decoded().color(Color::Grey);
    let collate = ToFloat::new(&[MEAN], &[STD])?;
    let (batch, seed) = (job.batch_size / job.micro_batches(), u64::from(job.seed));
    const READ_AHEAD: usize = 8;
    let loader = if cached {
        let loader = DataLoader::builder(Cached::new(folder)).batch_size(batch).shuffle(true).seed(seed);
        loader.num_workers(1).prefetch_factor(READ_AHEAD).collate(collate).to_device(device).build()?
    } else {
        let loader = DataLoader::builder(folder).batch_size(batch).shuffle(true).seed(seed);
        loader.num_workers(1).prefetch_factor(READ_AHEAD).collate(collate).to_device(device).build()?
    };
    Ok(Box::new(Loaded { loader, read_ahead: READ_AHEAD, to_float: None }))
}

/// Batches from a `DataLoader`.
pub struct Loaded {
    /// The loader.
    pub loader: DataLoader<Batch>,
    /// The most batches that its workers read ahead.
    pub read_ahead: usize,
    /// What is left to do with batches of bytes, on their device.
    pub to_float: Option<ToFloat>,
}

impl Feed for Loaded {
    fn epoch(&self, epoch: u64) -> Batches<'_> {
        let batches = self.loader.epoch(epoch);
        match &self.to_float {
            None => Box::new(batches),
            Some(to_float) => Box::new(batches.map(|batch| {
                let (images, labels) = batch?;
                Ok((to_float.apply(&images)?, labels))
            })),
        }
    }

    fn read_ahead(&self) -> usize {
        self.read_ahead
    }
}

/// The whole set in one tensor, decoded by tch at the start.
struct OneTensor {
    images: Tensor,
    labels: Tensor,
    batch_size: i64,
    seed: u64,
}

impl OneTensor {
    fn open(job: &Job, device: Device) -> Result<Self> {
        let mut files: Vec<(PathBuf, i64)> = Vec::new();
        for (label, class) in sorted(&job.train)?.iter().enumerate() {
            files.extend(sorted(class)?.into_iter().map(|file| (file, label as i64)));
        }
        // tch decodes grey images to three equal channels.
        let read = |(file, _): &(PathBuf, i64)| Ok(tch::vision::image::load(file)?.narrow(0, 0, 1));
        let images = Tensor::f_stack(&files.iter().map(read).collect::<Result<Vec<_>>>()?, 0)?;
        let labels = Tensor::from_slice(&files.iter().map(|(_, label)| *label).collect::<Vec<_>>()).to_device(device);
        let batch_size = (job.batch_size / job.micro_batches()) as i64;
        Ok(Self { images: normalized(&images)?.to_device(device), labels, batch_size, seed: u64::from(job.seed) })
    }
}

impl Feed for OneTensor {
    fn epoch(&self, epoch: u64) -> Batches<'_> {
        let count = self.labels.size().first().copied().unwrap_or(0) as usize;
        let order = RandomSampler::new(count, self.seed).order(epoch).into_iter().map(|index| index as i64);
        let order = Tensor::from_slice(&order.collect::<Vec<_>>()).to_device(self.labels.device());
        let (images, labels) = (self.images.index_select(0, &order), self.labels.index_select(0, &order));
        match Iter2::f_new(&images, &labels, self.batch_size) {
            Ok(mut batches) => {
                batches.return_smaller_last_batch();
                Box::new(batches.map(Ok))
            }
            Err(error) => Box::new(std::iter::once(Err(DataError::Tensor(error)))),
        }
    }
}

/// The entries of a folder, sorted by name.
fn sorted(folder: &std::path::Path) -> Result<Vec<PathBuf>> {
    let entries = std::fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?;
    let mut paths = entries.map(|entry| Ok(entry?.path())).collect::<Result<Vec<_>>>()?;
    paths.sort();
    Ok(paths)
}

fn normalized(images: &Tensor) -> Result<Tensor> {
    Ok((images.f_to_kind(Kind::Float)? / 255.0 - f64::from(MEAN)) / f64::from(STD))
}

/// The test images, float32 and normalised `[N, 1, 28, 28]`, and their labels.
///
/// # Errors
/// When the files cannot be read.
pub fn test_set(job: &Job) -> Result<Option<Batch>> {
    let Some(folder) = &job.test else { return Ok(None) };
    let test = Mnist::open(folder)?.test;
    let images = Tensor::from_slice(test.images()).f_view([-1, 1, 28, 28])?.f_narrow(0, 0, job.test_images as i64)?;
    let labels = Tensor::from_slice(test.labels()).f_narrow(0, 0, job.test_images as i64)?;
    Ok(Some((normalized(&images)?, labels.f_to_kind(Kind::Int64)?)))
}
