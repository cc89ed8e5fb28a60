//! Tables with lists on their way to the device.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use overdrive::dataload::{ParquetDataset, Table};
use overdrive::prelude::*;
use overdrive_fakecuda::waits;

use super::{paces, watched};
use crate::{GPU, fake};

/// Three row groups of 25 rows; most lists differ in length.
const FILE: &[u8] = include_bytes!("../../../../../crates/dataload/tests/fixtures/parquet/nested.parquet");

fn loader(device: Device) -> Result<DataLoader<Table>> {
    let rows = ParquetDataset::from_bytes(FILE.to_vec(), Path::new("nested.parquet"))?;
    let rows = rows.select(["ints", "deep", "vector"])?.list_size("vector", 3)?;
    let builder = rows.batches(7)?.shuffle(true).seed(3).window(2).loader().num_workers(2);
    Ok(builder.to_device(device).build()?)
}

/// The tensors of a batch: values and offsets of lists and of nested lists, and numbers.
fn tensors(batch: &Table) -> Result<Vec<Tensor>> {
    let mut tensors = vec![batch.tensor("vector")?.shallow_clone()];
    for lists in ["ints", "deep"] {
        let (values, offsets) = batch.ragged(lists)?.clone().into_tensors()?;
        tensors.push(values);
        tensors.extend(offsets);
    }
    Ok(tensors)
}

/// What a training loop computes of a batch, with lists padded, on its device.
fn digest(batch: &Table, device: Device) -> Result<Tensor> {
    let mut parts = tensors(batch)?;
    let (padded, lengths) = batch.ragged("ints")?.to_padded(-1.0, None)?;
    parts.extend([padded, lengths]);
    let elsewhere = parts.iter().filter(|part| part.device() != device).count();
    ensure!(elsewhere == 0, "{elsewhere} of {} tensors are not on {device:?}", parts.len());
    let sum = |(place, part): (usize, &Tensor)| part.sum(Kind::Double) * (place as f64 + 1.0);
    parts.iter().enumerate().map(sum).reduce(|sum, part| sum + part).context("no columns")
}

fn digests(device: Device) -> Result<Vec<f64>> {
    let (mut found, loader) = (Vec::new(), loader(device)?);
    for _epoch in 0..2 {
        for batch in &loader {
            found.push(digest(&batch?, device)?);
        }
    }
    Ok(found.iter().map(|it| it.double_value(&[])).collect())
}

/// Lists are on the device when they are used, at each pace, and pad there to what they pad to on the host.
pub fn lists_of_tables_arrive_whole() -> Result<()> {
    let expected = digests(Device::Cpu)?;
    for pace in paces(10) {
        let (found, notes) = watched(pace, || digests(GPU))?;
        ensure!(notes.is_empty(), "{pace:?}: {}", notes.join("; "));
        let found = found.with_context(|| format!("{pace:?}"))?;
        ensure!(found == expected, "{pace:?}: {found:?} instead of {expected:?}");
    }
    Ok(())
}

/// Each tensor of a table is copied once, from pinned memory, and the host waits for none, nor to pad lists.
pub fn tables_with_lists_go_to_the_device_without_waiting() -> Result<()> {
    let fake = fake()?;
    let mut bytes = 0;
    for batch in &loader(Device::Cpu)? {
        let sizes = tensors(&batch?)?.into_iter().map(|tensor| tensor.numel() * tensor.kind().elt_size_in_bytes());
        bytes += sizes.sum::<usize>() as u64;
    }
    let loader = loader(GPU)?;
    let epoch = || -> Result<()> {
        for batch in &loader {
            drop(digest(&batch?, GPU)?);
        }
        Ok(())
    };
    epoch()?;
    fake.reset();
    fake.trace_waits(true);
    epoch()?;
    fake.trace_waits(false);
    let counts = fake.counts();
    ensure!(waits(&counts) == 0, "waits: {}", fake.waits());
    let count = |name: &str| counts.get(name).copied().unwrap_or(0);
    ensure!(count("bytes host to device, pinned") == bytes, "{bytes} bytes in an epoch, {counts:?}");
    ensure!(count("bytes host to device, pageable") == 0, "{counts:?}");
    Ok(())
}
