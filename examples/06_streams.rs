//! Samples from tar shards and record files: mixed, decoded on background threads, stopped and resumed.
//!
//! Writes 1,000 of the shipped MNIST images as four WebDataset shards of PNG files, and their labels as two TFRecord
//! files, then reads both through a `DataLoader`.
//!
//! Expect: every image once per epoch, with two workers as with none; a run that is stopped within an epoch and
//! continues in a new loader with the next batch; an error that names a damaged shard, and a loader that skips it on
//! request.
//!
//!     cargo run -p overdrive-examples --example 06_streams
#![forbid(unsafe_code)]

use std::fs;
use std::num::ParseIntError;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use overdrive::dataload::{
    Color, DataError, Example, Feature, Image, Mnist, MnistSplit, OnError, Stack, TfRecordDataset, TfRecordWriter,
    WebDataset, WebDatasetWriter, decode_image,
};
use overdrive::prelude::*;

const MNIST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/mnist");
const IMAGES: usize = 1000;

fn main() -> Result<()> {
    let mnist = Mnist::open(MNIST)?.train.first(IMAGES);
    let folder = tempfile::tempdir()?;
    write_shards(&mnist, folder.path())?;
    let pattern = folder.path().join("digits-{0..3}.tar").to_string_lossy().into_owned();
    stopped_and_resumed(&pattern)?;
    damaged(&pattern, folder.path())?;
    records(&mnist, folder.path())
}

/// Writes `digits-0.tar` to `digits-3.tar`; `00012.png` and `00012.cls` are one sample.
fn write_shards(mnist: &MnistSplit, folder: &Path) -> Result<()> {
    let pattern = folder.join("digits-%d.tar").to_string_lossy().into_owned();
    let mut writer = WebDatasetWriter::builder(pattern).max_count(250).build()?;
    for number in 0..IMAGES {
        let (image, label) = mnist.get(number)?;
        let files = [("png", encode_png(&image)?), ("cls", label.to_string().into_bytes())];
        writer.write(&format!("{number:05}"), &files)?;
    }
    let files = writer.finish()?;
    println!("{} shards", files.len());
    ensure!(files.len() == 4);
    Ok(())
}

/// A loader with shards in random order and shuffled samples.
fn loader(pattern: &str, workers: usize, on_error: OnError) -> Result<DataLoader<(Tensor, Tensor)>> {
    let digits = WebDataset::open(pattern)?.map(|sample| {
        let png = sample.get("png").ok_or_else(|| DataError::other("no png"))?;
        let label = std::str::from_utf8(sample.get("cls").unwrap_or_default()).map_err(DataError::other)?;
        let image: Image = decode_image(png, Color::Grey, Path::new(sample.key()))?;
        let label: i64 = label.parse().map_err(|error: ParseIntError| DataError::other(error))?;
        Ok((image, label))
    });
    let builder = DataLoader::stream(digits).batch_size(32).shuffle(true).shuffle_buffer(100).seed(7);
    Ok(builder.num_workers(workers).on_error(on_error).collate(Stack).build()?)
}

fn stopped_and_resumed(pattern: &str) -> Result<()> {
    let whole: Vec<_> = loader(pattern, 0, OnError::Fail)?.iter().collect::<Result<_, _>>()?;
    let seen: i64 = whole.iter().map(|(images, _)| images.size()[0]).sum();
    ensure!(seen as usize == IMAGES, "{seen} images");

    let first = loader(pattern, 2, OnError::Fail)?;
    let mut batches: Vec<_> = first.iter().take(11).collect::<Result<_, _>>()?;
    let state = first.state_dict()?;
    let mut second = loader(pattern, 1, OnError::Fail)?;
    second.load_state_dict(&state)?;
    batches.extend(second.iter().collect::<Result<Vec<_>, _>>()?);
    let equal = batches.iter().zip(&whole).all(|(a, b)| a.0.equal(&b.0) && a.1.equal(&b.1));
    println!("{} batches, stopped after 11 and resumed: equal to an uninterrupted epoch: {equal}", whole.len());
    ensure!(equal && batches.len() == whole.len());
    println!("{}", second.stats());
    Ok(())
}

fn damaged(pattern: &str, folder: &Path) -> Result<()> {
    let path = folder.join("digits-2.tar");
    let mut bytes = fs::read(&path)?;
    bytes.truncate(bytes.len() / 2);
    fs::write(&path, bytes)?;

    let error =
        loader(pattern, 2, OnError::Fail)?.iter().find_map(Result::err).context("the damage was not noticed")?;
    println!("a shard cut in half: {error}");
    ensure!(error.to_string().contains("digits-2.tar"));
    let tolerant = loader(pattern, 2, OnError::Skip)?;
    let left: i64 = tolerant.iter().map(|batch| Ok(batch?.1.size()[0])).sum::<Result<i64, DataError>>()?;
    println!("skipped: {left} images are left, {} fault", tolerant.stats().faults);
    ensure!((750..1000).contains(&left) && tolerant.stats().faults == 1);
    Ok(())
}

/// Writes and reads the labels as `tf.train.Example`s, the format of TensorFlow.
fn records(mnist: &MnistSplit, folder: &Path) -> Result<()> {
    for shard in 0..2 {
        let mut writer = TfRecordWriter::create(folder.join(format!("labels-{shard}.tfrecord")))?;
        for number in (shard..IMAGES).step_by(2) {
            let label = Feature::Int64(vec![i64::from(mnist.labels()[number])]);
            writer.write_example(&Example::new().with("label", label))?;
        }
        writer.finish()?;
    }
    let pattern = folder.join("labels-*.tfrecord").to_string_lossy().into_owned();
    let labels = TfRecordDataset::open(&pattern)?
        .map(|record| record.example()?.int64("label").ok_or_else(|| DataError::other("no label")));
    let count = |labels: Vec<i64>| Ok(labels.iter().sum::<i64>());
    let loader = DataLoader::stream(labels).batch_size(100).num_workers(2).collate(count).build()?;
    let sum: i64 = loader.iter().sum::<Result<i64, DataError>>()?;
    println!("the labels from TFRecord files add up to {sum}");
    ensure!(sum == mnist.labels().iter().map(|&label| i64::from(label)).sum::<i64>());
    Ok(())
}

fn encode_png(image: &Image) -> Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let mut encoder = png::Encoder::new(&mut bytes, image.width() as u32, image.height() as u32);
    encoder.set_color(png::ColorType::Grayscale);
    encoder.write_header()?.write_image_data(image.data())?;
    Ok(bytes)
}
