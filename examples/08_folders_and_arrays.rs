//! Encoded images decoded straight into the batch, caches, and arrays of numpy and safetensors.
//!
//! Writes 600 of the shipped MNIST images as PNG files, one sub-folder per digit. Loads them with random crops through
//! an `ImageFolder` and an `ImagePipeline`, then through a cache in memory and one on disk. Then writes the
//! pixels as an npy and a safetensors file and reads them back as a dataset.
//!
//! Expect: the same crops with two workers as with none, and others in the next epoch; caches that are filled in the
//! first epoch, the disk cache also for the next run; equal pixels from every format.
//!
//!     cargo run -p overdrive-examples --example 08_folders_and_arrays
#![forbid(unsafe_code)]

use std::fs;
use std::path::Path;

use anyhow::{Result, ensure};
use overdrive::dataload::{Color, Disk, Mnist, MnistSplit, Ram, RandomResizedCrop, SafeTensorsFile, Stack, read_npy};
use overdrive::prelude::*;

const MNIST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/mnist");
const IMAGES: usize = 600;

fn main() -> Result<()> {
    let mnist = Mnist::open(MNIST)?.train.first(IMAGES);
    let folder = tempfile::tempdir()?;
    let digits = folder.path().join("digits");
    write_folder(&mnist, &digits)?;
    crops(&digits)?;
    caches(&digits, &folder.path().join("digits.cache"))?;
    arrays(&mnist, folder.path())
}

/// `<digit>/<number>.png` for each image.
fn write_folder(mnist: &MnistSplit, folder: &Path) -> Result<()> {
    for number in 0..IMAGES {
        let (image, label) = mnist.get(number)?;
        let class = folder.join(label.to_string());
        fs::create_dir_all(&class)?;
        let file = fs::File::create(class.join(format!("{number:05}.png")))?;
        let mut encoder = png::Encoder::new(file, MnistSplit::WIDTH as u32, MnistSplit::HEIGHT as u32);
        encoder.set_color(png::ColorType::Grayscale);
        encoder.write_header()?.write_image_data(image.data())?;
    }
    Ok(())
}

/// The random crop of a sample depends only on (seed, epoch, sample).
fn crops(digits: &Path) -> Result<()> {
    let loader = |workers| -> Result<DataLoader<(Tensor, Tensor)>> {
        let builder = DataLoader::builder(ImageFolder::open(digits)?).batch_size(50).shuffle(true).seed(1);
        let crops = ImagePipeline::new(1).then(RandomResizedCrop::new(20));
        Ok(builder.num_workers(workers).collate(crops).build()?)
    };
    let epoch =
        |workers, epoch| -> Result<Vec<Tensor>> { loader(workers)?.epoch(epoch).map(|batch| Ok(batch?.0)).collect() };
    let (none, two, next) = (epoch(0, 0)?, epoch(2, 0)?, epoch(2, 1)?);
    let same = none.iter().zip(&two).all(|(a, b)| a.equal(b));
    let new = none.iter().zip(&next).all(|(a, b)| !a.equal(b));
    println!(
        "{} batches of {:?}; the same from two workers: {same}; new in the next epoch: {new}",
        two.len(),
        two[0].size()
    );
    ensure!(same && new && two[0].size() == [50, 3, 20, 20]);
    Ok(())
}

fn caches(digits: &Path, cache: &Path) -> Result<()> {
    let images = || Ok::<_, anyhow::Error>(ImageFolder::open(digits)?.decoded().color(Color::Grey));
    let in_memory = DataLoader::builder(images()?).batch_size(100).cache(Ram)?.num_workers(2).collate(Stack).build()?;
    let on_disk = || {
        let builder = DataLoader::builder(images()?).batch_size(100).cache(Disk(cache.to_owned()))?;
        Ok::<_, anyhow::Error>(builder.num_workers(2).collate(Stack).build()?)
    };
    let sum = |loader: &DataLoader<(Tensor, Tensor)>| -> Result<i64> {
        loader.iter().map(|batch| Ok(batch?.0.sum(Kind::Int64).int64_value(&[]))).sum()
    };
    let first = sum(&in_memory)?;
    // Only one loader at a time may have the file open.
    let filled = sum(&on_disk()?)?;
    let again = sum(&on_disk()?)?;
    println!(
        "the pixels add up to {first}; from memory {}; from disk, filled {filled}, read {again}",
        sum(&in_memory)?
    );
    ensure!(first == sum(&in_memory)? && first == filled && first == again && cache.exists());
    Ok(())
}

fn arrays(mnist: &MnistSplit, folder: &Path) -> Result<()> {
    let pixels = Tensor::from_slice(mnist.images()).view([IMAGES as i64, 28, 28]);
    let labels: Vec<i64> = mnist.labels().iter().map(|&label| i64::from(label)).collect();
    let labels = Tensor::from_slice(&labels);
    let (npy, safetensors) = (folder.join("pixels.npy"), folder.join("digits.safetensors"));
    pixels.write_npy(&npy)?;
    Tensor::write_safetensors(&[("pixels", &pixels), ("labels", &labels)], &safetensors)?;

    let mut file = SafeTensorsFile::open(&safetensors)?;
    println!("{} holds {}", safetensors.file_name().unwrap_or_default().to_string_lossy(), file.names().join(", "));
    let read = (file.tensor("pixels")?, file.tensor("labels")?);
    ensure!(read.0.equal(&pixels) && read_npy(&npy)?.equal(&pixels));

    let loader = TensorDataset::new(read)?.loader().batch_size(128).shuffle(true).build()?;
    let mut seen = 0;
    for batch in &loader {
        let (pixels, labels) = batch?;
        ensure!(pixels.size()[0] == labels.size()[0]);
        seen += labels.size()[0];
    }
    println!("{seen} rows in batches");
    ensure!(seen as usize == IMAGES);
    Ok(())
}
