//! Batches on their way to the device: nothing is used too early, in whatever order the device gets on.

use anyhow::{Result, ensure};
use overdrive::dataload::{OnDevice, TensorDataset};
use overdrive::prelude::*;
use overdrive_fakecuda::{Fake, Pace};

use crate::GPU;

const SAMPLES: i64 = 48;
const SEEDS: u64 = 50;

fn samples() -> (Tensor, Tensor) {
    let numbers = Tensor::arange(SAMPLES * 16, (Kind::Float, Device::Cpu)).view([SAMPLES, 16]);
    (numbers, Tensor::arange(SAMPLES, (Kind::Int64, Device::Cpu)))
}

/// What a training loop computes of a batch, on the device.
fn digest((numbers, labels): &(Tensor, Tensor)) -> Tensor {
    (numbers.sum_dim_intlist(&[1i64][..], false, Kind::Float) * (labels + 1)).sum(Kind::Double)
}

fn digests(loader: &DataLoader<(Tensor, Tensor)>, epochs: usize, first: usize) -> Result<Vec<f64>> {
    let mut digests = Vec::new();
    for _ in 0..epochs {
        // An epoch that is dropped early leaves batches under way.
        for batch in loader.iter().take(first) {
            digests.push(digest(&batch?));
        }
    }
    Ok(digests.iter().map(|it| it.double_value(&[])).collect())
}

/// The device's digests are the host's, and on a fake device nothing was unordered, for each order that it may get on in.
fn same_as_on_the_host(
    make: impl Fn(Option<Device>) -> Result<DataLoader<(Tensor, Tensor)>>,
    first: usize,
) -> Result<()> {
    let expected = digests(&make(None)?, 3, first)?;
    let paces = match Fake::get() {
        Some(_) => [Pace::Eager, Pace::Lazy].into_iter().chain((1..=SEEDS).map(Pace::Random)).collect(),
        None => vec![Pace::Eager],
    };
    for pace in paces {
        if let Some(fake) = Fake::get() {
            fake.set_pace(pace);
            fake.find_races(true);
            fake.reset();
        }
        let found = digests(&make(Some(GPU))?, 3, first);
        let notes = Fake::get().map(Fake::notes).unwrap_or_default();
        if let Some(fake) = Fake::get() {
            fake.set_pace(Pace::Eager);
            fake.find_races(false);
        }
        ensure!(notes.is_empty(), "{pace:?}: {}", notes.join("; "));
        let found = found?;
        ensure!(found == expected, "{pace:?}: {found:?} instead of {expected:?}");
    }
    Ok(())
}

pub fn batches_from_pinned_memory_arrive_whole() -> Result<()> {
    let make = |device: Option<Device>| {
        let builder = DataLoader::builder(TensorDataset::new(samples())?).batch_size(8).num_workers(2);
        Ok(match device {
            Some(device) => builder.to_device(device).build()?,
            None => builder.build()?,
        })
    };
    same_as_on_the_host(make, usize::MAX)?;
    same_as_on_the_host(make, 3)
}

pub fn a_cache_on_the_device_holds_what_was_loaded() -> Result<()> {
    let make = |device: Option<Device>| {
        let builder = DataLoader::builder(TensorDataset::new(samples())?).batch_size(8).num_workers(2);
        Ok(match device {
            Some(device) => builder.cache(OnDevice(device))?.build()?,
            None => builder.build()?,
        })
    };
    same_as_on_the_host(make, usize::MAX)
}

pub fn a_dataset_on_the_device_is_read_there() -> Result<()> {
    let make = |device: Option<Device>| {
        let (numbers, labels) = samples();
        let device = device.unwrap_or(Device::Cpu);
        let dataset = TensorDataset::new((numbers.to_device(device), labels.to_device(device)))?;
        Ok(DataLoader::builder(dataset).batch_size(8).build()?)
    };
    same_as_on_the_host(make, usize::MAX)
}

/// The first epochs allocate; the driver is asked for nothing after them, and only the batches are copied.
pub fn later_epochs_ask_the_driver_for_nothing() -> Result<()> {
    let Some(fake) = Fake::get() else { return Ok(()) };
    let loader = DataLoader::builder(TensorDataset::new(samples())?).batch_size(8).to_device(GPU).build()?;
    digests(&loader, 4, usize::MAX)?;
    fake.reset();
    for batch in &loader {
        drop(digest(&batch?));
    }
    let counts = fake.counts();
    let count = |name: &str| counts.get(name).copied().unwrap_or(0);
    for never in ["events created", "device allocations", "pinned allocations", "streams created", "copies that wait"] {
        ensure!(count(never) == 0, "{never}: {}", count(never));
    }
    let waits: u64 = counts.iter().filter(|(name, _)| name.starts_with("waits for ")).map(|(_, times)| times).sum();
    ensure!(waits == 0, "{counts:?}");
    let bytes = SAMPLES as u64 * (16 * 4 + 8);
    ensure!(count("bytes host to device, pinned") == bytes, "{counts:?}");
    ensure!(count("bytes host to device, pageable") == 0, "{counts:?}");
    Ok(())
}
