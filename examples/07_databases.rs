//! Samples from an LMDB database and columns from Parquet files.
//!
//! Writes 500 of the shipped MNIST images into an LMDB database with a checksum for each value, and reads them back in
//! random order on two threads. Then reads Parquet files that pyarrow wrote: a column as a tensor, lists as ragged and
//! padded tensors, and shuffled batches.
//!
//! Expect: the same digits as in the original; an error that names the entry of a damaged value; equal sums from the
//! whole table and from its shuffled batches.
//!
//!     cargo run -p overdrive-examples --example 07_databases
#![forbid(unsafe_code)]

use std::fs;
use std::path::Path;

use anyhow::{Context, Result, ensure};
use overdrive::dataload::{Image, LmdbDataset, LmdbWriter, Mnist, MnistSplit, ParquetDataset, Stack};
use overdrive::prelude::*;

const MNIST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/mnist");
const PARQUET: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/dataload/tests/fixtures/parquet");
const IMAGES: usize = 500;

fn main() -> Result<()> {
    let mnist = Mnist::open(MNIST)?.train.first(IMAGES);
    let folder = tempfile::tempdir()?;
    let database = folder.path().join("digits.mdb");
    write_database(&mnist, &database)?;
    digits(&mnist, &database)?;
    damaged(&database)?;
    columns()
}

/// Writes entries with keys of eight digits, and the label and the pixels as values.
fn write_database(mnist: &MnistSplit, database: &Path) -> Result<()> {
    let mut writer = LmdbWriter::builder(database).checksums(true).create()?;
    for number in 0..IMAGES {
        let (image, label) = mnist.get(number)?;
        writer.write(format!("{number:08}").as_bytes(), &[&[label as u8], image.data()].concat())?;
    }
    writer.finish()?;
    Ok(())
}

fn digits(mnist: &MnistSplit, database: &Path) -> Result<()> {
    let digits = LmdbDataset::open(database)?.map(|entry| {
        let (label, pixels) = entry.value().split_first().unwrap_or((&0, &[]));
        Ok((Image::new(pixels, MnistSplit::HEIGHT, MnistSplit::WIDTH, 1)?, i64::from(*label)))
    });
    let loader = DataLoader::builder(digits).batch_size(50).shuffle(true).num_workers(2).collate(Stack).build()?;
    let mut counts = [0; 10];
    for batch in &loader {
        let (images, labels) = batch?;
        ensure!(images.size() == [50, 1, 28, 28]);
        Vec::<i64>::try_from(labels)?.into_iter().for_each(|label| counts[label as usize] += 1);
    }
    println!("{IMAGES} digits from LMDB, how many of each: {counts:?}");
    ensure!((0..10).all(|digit| counts[digit] == mnist.labels().iter().filter(|&&l| usize::from(l) == digit).count()));
    Ok(())
}

fn damaged(database: &Path) -> Result<()> {
    let mut bytes = fs::read(database)?;
    let pixels = Mnist::open(MNIST)?.train.get(123)?.0;
    let row = &pixels.data()[280..560];
    let place = bytes.windows(row.len()).position(|window| window == row).context("the image is not in the file")?;
    bytes[place + 14] ^= 1;
    fs::write(database, bytes)?;
    let dataset = LmdbDataset::open(database)?;
    let error = (0..dataset.len()).find_map(|index| dataset.get(index).err()).context("the damage was not noticed")?;
    println!("one bit of a value flipped: {error}");
    ensure!(error.to_string().contains("00000123"));
    Ok(())
}

fn columns() -> Result<()> {
    let numbers = ParquetDataset::open(&format!("{PARQUET}/numbers.parquet"))?;
    println!("{} rows in row groups of {:?}", numbers.rows(), numbers.row_groups().collect::<Vec<_>>());
    let numbers = numbers.select(["int64"])?;
    let whole = numbers.read()?;
    let sum = whole.tensor("int64")?.sum(Kind::Int64).int64_value(&[]);
    let mut shuffled = 0;
    for batch in numbers.batches(16)?.shuffle(true).seed(3).epoch(0) {
        shuffled += batch?.tensor("int64")?.sum(Kind::Int64).int64_value(&[]);
    }
    println!("the column adds up to {sum}, its shuffled batches to {shuffled}");
    ensure!(sum == shuffled);

    // Workers, resume and copies to a device work as in any other loader.
    let loader = numbers.batches(16)?.shuffle(true).seed(3).loader().num_workers(2).build()?;
    let first: Vec<_> = loader.iter().take(2).collect::<Result<_, _>>()?;
    let state = loader.state_dict()?;
    let mut later = numbers.batches(16)?.shuffle(true).seed(3).loader().build()?;
    later.load_state_dict(&state)?;
    let rest: Vec<_> = later.iter().collect::<Result<_, _>>()?;
    println!(
        "a loader stopped after {} of its {} batches, and another one continued",
        first.len(),
        first.len() + rest.len()
    );
    ensure!(later.len() == Some(first.len() + rest.len()));

    let lists = ParquetDataset::open(&format!("{PARQUET}/nested.parquet"))?.select(["ints"])?.read()?;
    let ragged = lists.ragged("ints")?;
    let (padded, lengths) = ragged.to_padded(-1.0, None)?;
    println!("{} lists, padded to {:?}, the first lengths {:?}", ragged.rows(), padded.size(), lengths.narrow(0, 0, 4));
    ensure!(padded.size()[0] == lengths.size()[0]);
    Ok(())
}
