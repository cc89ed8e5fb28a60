//! Batches on their way to the device: nothing is used too early, in whatever order the device gets on.

mod gates;
mod memory;
mod planted;
mod tables;

use anyhow::{Context, Result, ensure};
use overdrive::dataload::TensorDataset;
use overdrive::ffi::cuda;
use overdrive::prelude::*;
use overdrive_fakecuda::{Counts, Fake, Pace, allocations, waits};

use crate::ranks::{Meeting, run_alone, uses_only};
use crate::{GPU, fake};

pub use memory::{
    a_cache_on_the_device_is_filled_beside_the_computation, a_cache_on_the_device_keeps_the_samples_alone,
    batches_ahead_take_no_more_than_the_devices_budget, the_last_batch_is_free_when_its_epoch_has_ended,
};
pub use planted::{
    a_batch_dropped_early_is_found, a_loader_that_forgets_a_wait_is_found, a_missing_record_stream_is_found,
    a_missing_wait_is_found, a_pinned_buffer_used_again_is_found,
};
pub use tables::{lists_of_tables_arrive_whole, tables_with_lists_go_to_the_device_without_waiting};

const SAMPLES: i64 = 48;
const BATCH: usize = 8;
const FEATURES: i64 = 64;
const SEEDS: u64 = 50;

fn samples() -> (Tensor, Tensor) {
    let numbers = Tensor::arange(SAMPLES * FEATURES, (Kind::Float, Device::Cpu)).view([SAMPLES, FEATURES]);
    (numbers, Tensor::arange(SAMPLES, (Kind::Int64, Device::Cpu)))
}

/// What a training loop computes of a batch, on the device.
fn digest((numbers, labels): &(Tensor, Tensor)) -> Tensor {
    let numbers = numbers.flatten(1, -1).sum_dim_intlist(&[1i64][..], false, Kind::Float);
    (numbers * (labels + 1)).sum(Kind::Double)
}

/// Eager, lazy, and as many seeds. A real device has a pace of its own.
pub fn paces(seeds: u64) -> Vec<Pace> {
    match Fake::get() {
        Some(_) => [Pace::Eager, Pace::Lazy].into_iter().chain((1..=seeds).map(Pace::Random)).collect(),
        None => vec![Pace::Eager],
    }
}

/// Runs a program at a pace, with its result and what a fake device found: accesses without an order, and pinned pages
/// that the host touched before it had waited for their copy.
pub fn watched<T>(pace: Pace, program: impl FnOnce() -> T) -> Result<(T, Vec<String>)> {
    let Some(fake) = Fake::get().map(Fake::lend) else { return Ok((program(), Vec::new())) };
    fake.set_pace(pace);
    fake.find_races(true);
    ensure!(fake.guard_pinned(true), "pinned memory cannot be guarded");
    fake.reset();
    let result = program();
    let (notes, left_out) = (fake.notes(), fake.counts().get("copies that the guard left out").copied());
    fake.reset();
    ensure!(left_out.is_none(), "the guard left out {left_out:?} copies");
    Ok((result, notes))
}

pub fn batches_arrive_whole_from_every_source() -> Result<()> {
    gates::hold(GPU, &paces(3))
}

/// With all seeds, in a process that sees two devices and may use the second one alone.
pub fn nothing_is_early_or_on_another_device() -> Result<()> {
    let ended = run_alone("loading", 2, &[])?;
    let held = ended.lines("held").first().and_then(|number| number.parse().ok());
    ensure!(held == Some(2 + SEEDS), "{held:?} paces: {}", ended.output);
    Ok(())
}

/// The gates, in a process that sees several devices and uses the last one.
pub fn scenario(meeting: &Meeting) -> Result<()> {
    let paces = paces(SEEDS);
    gates::hold(Device::Cuda(meeting.rank), &paces)?;
    println!("held {}", paces.len());
    uses_only(meeting.rank, meeting.size)
}

/// A loader is the first in its process that uses CUDA, with a device that is not the first.
pub fn a_loader_begins_on_its_own_device_alone() -> Result<()> {
    gates::to_a_device().try_for_each(|source| run_alone("first loading", 2, &[&source]).map(drop).context(source))
}

pub fn begins(meeting: &Meeting) -> Result<()> {
    let [source] = &meeting.arguments[..] else { anyhow::bail!("a source is needed") };
    gates::take(source, Device::Cuda(meeting.rank))?;
    uses_only(meeting.rank, meeting.size)
}

/// The device's memory for batches does not grow with the host's lead: at the lazy pace the device begins when the host
/// has issued all steps.
pub fn batches_need_no_more_memory_where_the_host_is_ahead() -> Result<()> {
    const BATCHES: i64 = 16;
    // Larger than what the allocator splits.
    const BYTES: i64 = 12 << 20;
    for workers in [0, 2] {
        let rows = Tensor::arange(BATCHES, (Kind::Float, Device::Cpu)).view([BATCHES, 1]).repeat([1, BYTES / 4]);
        let builder = TensorDataset::new(rows)?.loader().batch_size(1).num_workers(workers);
        let loader = builder.to_device(GPU).build()?;
        let (reserved, notes) = watched(Pace::Lazy, || -> Result<i64> {
            cuda::empty_cache()?;
            cuda::reset_peak_memory_stats(0)?;
            let before = cuda::memory_stats(0)?.reserved_bytes;
            let means = loader.iter().map(|batch| Ok(batch?.mean(Kind::Float))).collect::<Result<Vec<_>>>()?;
            let reserved = cuda::memory_stats(0)?.reserved_peak_bytes - before;
            for (batch, mean) in means.iter().enumerate() {
                ensure!(mean.double_value(&[]) == batch as f64, "batch {batch}: {mean}");
            }
            Ok(reserved)
        })?;
        ensure!(notes.is_empty(), "{}", notes.join("; "));
        // Those loaded ahead, the one that is computed with, and the one before it; and the means.
        let (reserved, most) = (reserved?, (2 * workers as i64 + 2) * BYTES + (2 << 20));
        ensure!(reserved <= most, "{workers} workers: {reserved} bytes, {most} are enough");
    }
    Ok(())
}

/// The driver is asked for what one epoch holds at a time, however many epochs follow, and only the batches are copied:
/// images as the three bytes of each pixel.
pub fn later_epochs_ask_the_driver_for_one_epoch_at_most() -> Result<()> {
    let loader = DataLoader::builder(TensorDataset::new(samples())?).batch_size(BATCH).to_device(GPU).build()?;
    let images = gates::images(GPU)?;
    for pace in paces(2) {
        asks_for_one_epoch(&loader, FEATURES * 4 + 8, pace).with_context(|| format!("{pace:?}"))?;
        asks_for_one_epoch(&images, 3 * FEATURES + 8, pace).with_context(|| format!("images, {pace:?}"))?;
    }
    Ok(())
}

/// However long an epoch is, the driver is asked for what can be under way at a time: also events come from a pool.
pub fn a_long_epoch_asks_the_driver_for_what_is_under_way_alone() -> Result<()> {
    const AHEAD: usize = 2;
    let fake = fake()?;
    for workers in [0, 2] {
        let builder = DataLoader::builder(TensorDataset::new(samples())?).batch_size(1).to_device(GPU);
        let builder = if workers > 0 { builder.num_workers(workers).prefetch_factor(AHEAD) } else { builder };
        let loader = builder.build()?;
        let epoch = || loader.iter().try_for_each(|batch| batch.map(|batch| drop(digest(&batch))));
        fake.reset();
        (0..20).try_for_each(|_| epoch())?;
        // Those that wait, one in each worker's hands, the one that is computed with, and the one before it.
        let batches = (workers * AHEAD + workers + 2) as u64;
        ensure!(5 * batches < SAMPLES as u64, "an epoch has more");
        asks_for_batches(&fake.counts(), batches).with_context(|| format!("{workers} workers"))?;
        if workers == 0 {
            fake.reset();
            (0..20).try_for_each(|_| epoch())?;
            asks_for_batches(&fake.counts(), 0).context("with all of it there")?;
        }
    }
    Ok(())
}

/// A batch has two tensors. libtorch's allocators record an event for each, on the host and on the device, and the
/// loader one for the batch.
fn asks_for_batches(counts: &Counts, batches: u64) -> Result<()> {
    for (name, most) in
        [("events created", 5 * batches), ("device allocations", 2 * batches), ("pinned allocations", 2 * batches)]
    {
        let count = counts.get(name).copied().unwrap_or(0);
        ensure!(count <= most, "{name}: {count}, {most} are enough");
    }
    ensure!(allocations(counts) <= 4 * batches, "memory asked for in another way: {counts:?}");
    Ok(())
}

/// How many batches are under way at a time depends on how far the workers get ahead, so an epoch may be the first to
/// hold one more. An epoch's batches are the most that any of them can hold. The pinned memory of a copy that waits is
/// not free yet, so where the device lags, the host reads a number after each epoch and is never further ahead.
fn asks_for_one_epoch(loader: &DataLoader<(Tensor, Tensor)>, sample_bytes: i64, pace: Pace) -> Result<()> {
    const EPOCHS: u64 = 20;
    let fake = Fake::get().context("only a fake device counts what the driver is asked for")?.lend();
    fake.set_pace(pace);
    let reads = pace != Pace::Eager;
    let epoch = || -> Result<()> {
        let mut last = None;
        for batch in loader {
            last = Some(digest(&batch?));
        }
        last.filter(|_| reads).map(|last| last.double_value(&[]));
        Ok(())
    };
    epoch()?;
    fake.reset();
    fake.trace_waits(true);
    (0..EPOCHS).try_for_each(|_| epoch())?;
    let counts = fake.counts();
    let count = |name: &str| counts.get(name).copied().unwrap_or(0);
    asks_for_batches(&counts, SAMPLES as u64 / BATCH as u64).with_context(|| format!("in {EPOCHS} epochs"))?;
    ensure!(count("streams created") == 0, "{counts:?}");
    let expected = if reads { EPOCHS } else { 0 };
    ensure!(waits(&counts) == expected, "{} waits instead of {expected}: {}", waits(&counts), fake.waits());
    let bytes = EPOCHS * (SAMPLES * sample_bytes) as u64;
    ensure!(count("bytes host to device, pinned") == bytes, "{counts:?}");
    ensure!(count("bytes host to device, pageable") == 0, "{counts:?}");
    Ok(())
}
