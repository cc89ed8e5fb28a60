//! The photographs: a ResNet, and the sources of its batches.

use anyhow::{Context, Result};
use overdrive_bench_report::Contender;
use overdrive_dataload::{
    DataError, DataLoader, ImageFolder, ImagePipeline, RandomHorizontalFlip, RandomResizedCrop, RandomSampler, Sampler,
    ToFloat,
};
use tch::nn::{self, ModuleT};
use tch::vision::{image, resnet};
use tch::{Device, Kind, Tensor};

use super::digits::Loaded;
use super::job::{Job, has_workers, threads_in_turns};
use super::trainer::{Batch, Batches, Feed, Model};

/// ImageNet's mean and standard deviation on the scale from 0 to 1.
const MEAN: [f32; 3] = [0.485, 0.456, 0.406];
const STD: [f32; 3] = [0.229, 0.224, 0.225];

/// The side of a training image in pixels.
pub fn side(device: Device) -> usize {
    if device.is_cuda() { 224 } else { 96 }
}

/// tch's ResNet-18; on a GPU, ResNet-50.
pub fn model(vs: &nn::Path<'_>, device: Device, classes: i64) -> Result<Model> {
    let model: Box<dyn ModuleT> = match device.is_cuda() {
        true => Box::new(resnet::resnet50(vs, classes)),
        false => Box::new(resnet::resnet18(vs, classes)),
    };
    Ok(Box::new(move |images, train| model.forward_t(images, train)))
}

/// The number of classes in the training folder.
///
/// # Errors
/// When it cannot be read.
pub fn classes(job: &Job) -> Result<i64> {
    Ok(ImageFolder::open(&job.train)?.classes().len() as i64)
}

/// The source of batches for the job's techniques.
///
/// # Errors
/// When the data cannot be read.
pub fn feed(job: &Job, device: Device) -> Result<Box<dyn Feed>> {
    let folder = ImageFolder::open(&job.train)?;
    let (batch_size, seed, side) = (job.batch_size / job.micro_batches(), u64::from(job.seed), side(device));
    let scaled = job.has(Contender::ScaledDecode);
    if !has_workers(job) {
        let files = folder.files().iter().map(|(path, label)| (path.to_path_buf(), *label)).collect();
        return Ok(Box::new(OneByOne { files, batch_size, seed, side: side as i64 }));
    }
    let to_float = ToFloat::new(&MEAN, &STD)?;
    let pipeline = ImagePipeline::new(seed)
        .then(RandomResizedCrop::new(side))
        .then(RandomHorizontalFlip::default())
        .dct_scaling(scaled);
    let loader = DataLoader::builder(folder).batch_size(batch_size).shuffle(true).seed(seed).drop_last(true);
    // PyTorch's default.
    const PREFETCH_FACTOR: usize = 2;
    let workers = job.threads as usize;
    let loader = loader.num_workers(workers).prefetch_factor(PREFETCH_FACTOR);
    let loader = match threads_in_turns(job) {
        Some(threads) => loader.compute_threads(threads),
        None => loader,
    };
    let read_ahead = workers * PREFETCH_FACTOR;
    Ok(Box::new(match device.is_cuda() {
        // A quarter of the bytes is copied to the device.
        true => {
            let loader = loader.collate(pipeline).to_device(device).build()?;
            Loaded { loader, read_ahead, to_float: Some(to_float) }
        }
        false => Loaded { loader: loader.collate(pipeline.to_float(to_float)).build()?, read_ahead, to_float: None },
    }))
}

/// Photographs that the training thread decodes one by one: tch has no loader.
struct OneByOne {
    files: Vec<(std::path::PathBuf, i64)>,
    batch_size: usize,
    seed: u64,
    side: i64,
}

impl Feed for OneByOne {
    fn epoch(&self, epoch: u64) -> Batches<'_> {
        let order = RandomSampler::new(self.files.len(), self.seed).order(epoch);
        let batches: Vec<Vec<usize>> = order.chunks_exact(self.batch_size).map(<[usize]>::to_vec).collect();
        Box::new(batches.into_iter().map(|batch| self.batch(&batch).map_err(DataError::Tensor)))
    }
}

impl OneByOne {
    fn batch(&self, batch: &[usize]) -> Result<Batch, tch::TchError> {
        let images = batch.iter().map(|&index| random_crop(&image::load(&self.files[index].0)?, self.side));
        let images = Tensor::f_stack(&images.collect::<Result<Vec<_>, _>>()?, 0)?;
        let labels: Vec<i64> = batch.iter().map(|&index| self.files[index].1).collect();
        Ok((normalized(&images)?, Tensor::from_slice(&labels)))
    }
}

/// `torchvision.transforms.RandomResizedCrop` and `RandomHorizontalFlip`, with tch's functions.
fn random_crop(image: &Tensor, side: i64) -> Result<Tensor, tch::TchError> {
    let uniform =
        |low: f64, high: f64| low + (high - low) * Tensor::rand([], (Kind::Double, Device::Cpu)).double_value(&[]);
    let (_, height, width) = image.size3()?;
    let size = || {
        let area = uniform(0.08, 1.0) * (height * width) as f64;
        let ratio = uniform((3f64 / 4.0).ln(), (4f64 / 3.0).ln()).exp();
        let (w, h) = ((area * ratio).sqrt().round() as i64, (area / ratio).sqrt().round() as i64);
        ((1..=width).contains(&w) && (1..=height).contains(&h)).then_some((w, h))
    };
    // torchvision tries ten sizes too, and takes the middle when none fits.
    let (w, h) = (0..10).find_map(|_| size()).unwrap_or((width, height));
    let place = |room: i64| Tensor::randint(room + 1, [], (Kind::Int64, Device::Cpu)).int64_value(&[]);
    let (top, left) = (place(height - h), place(width - w));
    let part = image::resize(&image.f_narrow(1, top, h)?.f_narrow(2, left, w)?, side, side)?;
    if uniform(0.0, 1.0) < 0.5 { part.f_flip([-1]) } else { Ok(part) }
}

fn normalized(images: &Tensor) -> Result<Tensor, tch::TchError> {
    let of = |values: [f32; 3]| Tensor::from_slice(&values).view([1, 3, 1, 1]);
    (images.f_to_kind(Kind::Float)? / 255.0).f_sub(&of(MEAN))?.f_div(&of(STD))
}

/// The center crops of the test images, and their labels.
///
/// # Errors
/// When a file cannot be read.
pub fn test_set(job: &Job, device: Device) -> Result<Option<Batch>> {
    let Some(folder) = &job.test else { return Ok(None) };
    let folder = ImageFolder::open(folder)?;
    let side = side(device) as i64;
    let whole = side * 8 / 7;
    let mut images = Vec::new();
    for (path, _) in folder.files().iter().take(job.test_images) {
        let image = image::load(path)?;
        let (_, height, width) = image.size3()?;
        let scale = whole as f64 / height.min(width) as f64;
        let (w, h) = ((width as f64 * scale).round() as i64, (height as f64 * scale).round() as i64);
        let image = image::resize(&image, w.max(side), h.max(side))?;
        images.push(image.f_narrow(1, (h.max(side) - side) / 2, side)?.f_narrow(2, (w.max(side) - side) / 2, side)?);
    }
    let labels: Vec<i64> = folder.files().iter().take(job.test_images).map(|(_, label)| *label).collect();
    let images = Tensor::f_stack(&images, 0).context("no test photographs")?;
    Ok(Some((normalized(&images)?, Tensor::from_slice(&labels))))
}
