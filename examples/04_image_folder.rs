//! A folder of encoded images, decoded on background threads, kept in memory, and normalised.
//!
//! Writes 600 of the shipped MNIST images as PNG files into a temporary folder, one sub-folder per digit, and loads
//! them for three epochs through a decoded `ImageFolder`, `Cached` and a `DataLoader`.
//!
//! Expect: a first epoch that decodes and later ones that do not; the same batches with two workers as with none; the
//! same pixels as in the original; an error that names a damaged file, and a loader that works again once the file is
//! repaired.
//!
//!     cargo run -p overdrive-examples --example 04_image_folder
#![forbid(unsafe_code)]

use std::fs;
use std::io::BufWriter;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use overdrive::dataload::{Color, DecodedImageFolder, Mnist, MnistSplit, ToFloat};
use overdrive::prelude::*;

const MNIST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/mnist");
const IMAGES: usize = 600;

fn main() -> Result<()> {
    let mnist = Mnist::open(MNIST)?.train.first(IMAGES);
    let folder = tempfile::tempdir()?;
    write_folder(&mnist, folder.path())?;

    let files = ImageFolder::open(folder.path())?;
    println!("{} images in {} classes: {}", files.len(), files.classes().len(), files.classes().join(" "));
    ensure!(files.len() == IMAGES && files.classes().len() == 10);
    let images = files.decoded().color(Color::Grey);
    epochs(images.clone())?;
    same_batches_from_any_number_of_workers(&images)?;
    same_pixels(&images, &mnist)?;
    damage(images)
}

/// `<digit>/<number>.png` for each image.
fn write_folder(mnist: &MnistSplit, folder: &Path) -> Result<()> {
    let images = mnist.images().chunks_exact(MnistSplit::IMAGE_BYTES);
    for (number, (image, digit)) in images.zip(mnist.labels()).enumerate() {
        let class = folder.join(digit.to_string());
        fs::create_dir_all(&class)?;
        let file = BufWriter::new(fs::File::create(class.join(format!("{number:05}.png")))?);
        let mut encoder = png::Encoder::new(file, MnistSplit::WIDTH as u32, MnistSplit::HEIGHT as u32);
        encoder.set_color(png::ColorType::Grayscale);
        encoder.write_header()?.write_image_data(image)?;
    }
    Ok(())
}

fn epochs(images: DecodedImageFolder) -> Result<()> {
    let images = Arc::new(Cached::new(images));
    let loader = DataLoader::builder(images.clone())
        .batch_size(64)
        .shuffle(true)
        .num_workers(2)
        .collate(ToFloat::new(&[0.1307], &[0.3081])?)
        .build()?;
    for epoch in 0..3 {
        loader.reset_stats();
        let cached = images.cached();
        let started = Instant::now();
        let mut samples = 0;
        for batch in &loader {
            let (pixels, labels) = batch?;
            ensure!(pixels.size()[1..] == [1, 28, 28] && pixels.kind() == Kind::Float);
            samples += labels.size()[0];
        }
        println!(
            "epoch {epoch}: {cached} images in memory at the start, {samples} samples in {} batches, {:.1} ms",
            loader.stats().batches,
            started.elapsed().as_secs_f64() * 1e3
        );
        ensure!(samples as usize == IMAGES && Some(loader.stats().batches as usize) == loader.len());
        ensure!(cached == if epoch == 0 { 0 } else { IMAGES });
    }
    Ok(())
}

fn same_batches_from_any_number_of_workers(images: &DecodedImageFolder) -> Result<()> {
    let batches = |workers| -> Result<Vec<(Tensor, Tensor)>> {
        let loader =
            DataLoader::builder(images.clone()).batch_size(50).shuffle(true).seed(5).num_workers(workers).build()?;
        Ok(loader.iter().collect::<Result<_, _>>()?)
    };
    let (here, elsewhere) = (batches(0)?, batches(2)?);
    let equal = here.iter().zip(&elsewhere).all(|(a, b)| a.0.equal(&b.0) && a.1.equal(&b.1));
    println!("{} batches, equal with 0 and with 2 workers: {equal}", here.len());
    ensure!(equal && here.len() == 12 && elsewhere.len() == 12);
    Ok(())
}

fn same_pixels(images: &DecodedImageFolder, mnist: &MnistSplit) -> Result<()> {
    for (index, (path, label)) in images.folder().files().iter().enumerate() {
        let stem = path.file_stem().and_then(|stem| stem.to_str()).context("the file has no name")?;
        let (image, expected) = (images.get(index)?.0, mnist.get(stem.parse()?)?);
        ensure!((image.data(), *label) == (expected.0.data(), expected.1), "{} differs", path.display());
    }
    println!("every file decodes to the pixels that it was made from");
    Ok(())
}

fn damage(images: DecodedImageFolder) -> Result<()> {
    let path = images.folder().files()[123].0.clone();
    let whole = fs::read(&path)?;
    fs::write(&path, &whole[..whole.len() / 2])?;
    let loader = DataLoader::builder(images).batch_size(50).num_workers(2).build()?;
    let error = loader.iter().find_map(Result::err).context("the damage was not noticed")?;
    println!("a file cut in half: {error}");
    ensure!(error.to_string().contains(&*path.to_string_lossy()));

    fs::write(&path, &whole)?;
    let batches = loader.iter().collect::<Result<Vec<_>, _>>()?.len();
    println!("repaired: the same loader gives {batches} batches");
    ensure!(Some(batches) == loader.len());
    Ok(())
}
