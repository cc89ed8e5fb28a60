//! Every source of batches, used in every way that leaves some under way: the device computes what the host does.

use anyhow::{Context, Result, ensure};
use overdrive::dataload::{
    DataError, EncodedImage, FnDataset, FnStream, Image, ImagePipeline, OnDevice, Stack, TensorDataset,
};
use overdrive::prelude::*;
use overdrive_fakecuda::Pace;

use super::{BATCH, FEATURES, SAMPLES, digest, samples, watched};

type Loader = DataLoader<(Tensor, Tensor)>;

/// Where batches come from.
#[derive(Clone, Copy, Debug)]
pub enum Source {
    /// Samples of the host, stacked by workers, pinned, and copied by a stream of its own.
    Stacked,
    /// Rows of tensors on the host, gathered for a whole batch, and copied likewise.
    HostRows,
    /// Rows of tensors on the device, gathered there.
    DeviceRows,
    /// Samples that were copied to the device in the first epoch.
    DeviceCache,
    /// Image files, decoded into pinned memory of bytes that held another batch.
    Images,
    /// Samples of a stream of shards.
    Stream,
    /// Batches in pinned memory, which the loop copies itself.
    Pinned,
}

const SOURCES: [Source; 7] = [
    Source::Stacked,
    Source::HostRows,
    Source::DeviceRows,
    Source::DeviceCache,
    Source::Images,
    Source::Stream,
    Source::Pinned,
];

/// How a training loop takes them.
#[derive(Clone, Copy, Debug)]
pub enum Way {
    Whole,
    /// Each epoch is dropped after a few batches.
    DroppedEpochs,
    /// The next epoch is made, and loads its batches, while this one is taken.
    NextEpochAhead,
    /// The loader is dropped before its epoch, which is dropped with batches under way.
    DroppedLoader,
}

const WAYS: [Way; 4] = [Way::Whole, Way::DroppedEpochs, Way::NextEpochAhead, Way::DroppedLoader];

fn loader(source: Source, device: Device) -> Result<Loader> {
    let (numbers, labels) = samples();
    match source {
        Source::DeviceRows => {
            let dataset = TensorDataset::new((numbers.to_device(device), labels.to_device(device)))?;
            return Ok(dataset.loader().batch_size(BATCH).shuffle(true).seed(5).num_workers(2).build()?);
        }
        Source::Images => return images(device),
        Source::Stream => {
            let shard = |shard| Ok((0..SAMPLES as usize / 4).map(move |place| image(4 * place + shard)));
            let builder = DataLoader::stream(FnStream::new(4, shard)).batch_size(BATCH).shuffle(true).seed(5);
            return Ok(builder.num_workers(2).collate(Stack).to_device(device).build()?);
        }
        _ => {}
    }
    let dataset = TensorDataset::new((numbers, labels))?;
    let stacked = |dataset| DataLoader::builder(dataset).batch_size(BATCH).shuffle(true).seed(5).num_workers(2);
    Ok(match source {
        Source::HostRows => {
            let builder = dataset.loader().batch_size(BATCH).shuffle(true).seed(5).num_workers(2);
            builder.to_device(device).build()?
        }
        Source::DeviceCache => stacked(dataset).cache(OnDevice(device))?.build()?,
        Source::Pinned => stacked(dataset).pin_memory(device.is_cuda()).build()?,
        _ => stacked(dataset).to_device(device).build()?,
    })
}

/// Each pixel tells its image.
fn image(number: usize) -> Result<(Image, i64), DataError> {
    let pixels: Vec<u8> = (0..FEATURES as usize).map(|pixel| ((number + 1) * (pixel + 1)) as u8).collect();
    Ok((Image::new(pixels, 8, FEATURES as usize / 8, 1)?, number as i64))
}

/// The same images as PNG files, which are decoded into the batch.
pub fn images(device: Device) -> Result<Loader> {
    let files = (0..SAMPLES as usize).map(|number| {
        let (mut file, (image, label)) = (Vec::new(), image(number)?);
        let mut encoder = png::Encoder::new(&mut file, FEATURES as u32 / 8, 8);
        encoder.set_color(png::ColorType::Grayscale);
        encoder.write_header()?.write_image_data(image.data())?;
        Ok((EncodedImage::new(file, format!("{number}.png")), label))
    });
    let files = files.collect::<Result<Vec<_>>>()?;
    let dataset = FnDataset::new(files.len(), move |index| Ok(files[index].clone()));
    let builder = DataLoader::builder(dataset).batch_size(BATCH).shuffle(true).seed(5).num_workers(2);
    Ok(builder.collate(ImagePipeline::new(0)).to_device(device).build()?)
}

fn digests(loader: Loader, device: Device, way: Way) -> Result<Vec<Tensor>> {
    let mut digests = Vec::new();
    let mut take = |batches: &mut dyn Iterator<Item = Result<(Tensor, Tensor), _>>| -> Result<()> {
        for batch in batches {
            let batch: Result<_, overdrive::dataload::DataError> = batch;
            let (numbers, labels) = batch?;
            let there = |tensor: &Tensor| tensor.to_device_(device, tensor.kind(), true, false);
            digests.push(digest(&(there(&numbers), there(&labels))));
        }
        Ok(())
    };
    match way {
        Way::Whole => (0..3).try_for_each(|_| take(&mut loader.iter()))?,
        Way::DroppedEpochs => (0..3).try_for_each(|_| take(&mut loader.iter().take(3)))?,
        Way::NextEpochAhead => {
            let mut epoch = loader.iter();
            take(&mut epoch.by_ref().take(2))?;
            for _ in 0..2 {
                let mut next = loader.iter();
                take(&mut next.by_ref().take(1))?;
                take(&mut epoch)?;
                epoch = next;
            }
            take(&mut epoch)?;
        }
        Way::DroppedLoader => {
            take(&mut loader.iter())?;
            let mut epoch = loader.iter();
            drop(loader);
            take(&mut epoch.by_ref().take(3))?;
        }
    }
    Ok(digests)
}

fn values(loader: Loader, device: Device, way: Way) -> Result<Vec<f64>> {
    Ok(digests(loader, device, way)?.iter().map(|it| it.double_value(&[])).collect())
}

/// The sources whose loader is told the device.
pub fn to_a_device() -> impl Iterator<Item = String> {
    SOURCES.iter().filter(|source| !matches!(source, Source::Pinned)).map(|source| format!("{source:?}"))
}

/// Takes an epoch from the source of this name.
pub fn take(name: &str, device: Device) -> Result<()> {
    let source = SOURCES.into_iter().find(|source| format!("{source:?}") == name).context("no such source")?;
    values(loader(source, device)?, device, Way::Whole).map(drop)
}

/// What a loop over the device's batches computes is what it computes over the host's, at each pace; on a fake device
/// there is no access without an order, and no pinned page is touched early.
pub fn hold(device: Device, paces: &[Pace]) -> Result<()> {
    SOURCES.iter().try_for_each(|source| WAYS.iter().try_for_each(|way| hold_one(device, *source, *way, paces)))
}

/// The same for batches from one source, taken in one way.
pub fn hold_one(device: Device, source: Source, way: Way, paces: &[Pace]) -> Result<()> {
    let expected = values(loader(source, Device::Cpu)?, Device::Cpu, way)?;
    for &pace in paces {
        let at = || format!("{source:?}, {way:?}, {pace:?}");
        let (found, notes) = watched(pace, || values(loader(source, device)?, device, way)).with_context(at)?;
        ensure!(notes.is_empty(), "{}: {}", at(), notes.join("; "));
        let found = found.with_context(at)?;
        ensure!(found == expected, "{}: {found:?} instead of {expected:?}", at());
    }
    Ok(())
}
