//! When the memory of batches is used again, and when it is free.

use std::cell::Cell;
use std::sync::mpsc::{RecvError, channel};
use std::sync::{Mutex, PoisonError};
use std::thread::sleep;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use overdrive::dataload::{DataError, FnDataset, OnDevice, TensorBatch, TensorDataset};
use overdrive::ffi::{TimedEvent, cuda};
use overdrive::prelude::*;
use overdrive_fakecuda::Pace;

use super::watched;
use crate::{FLOAT, GPU, fake};

/// Larger than what the allocator splits.
const FLOATS: i64 = 3 << 20;

/// When a loop drops the last batch that it takes.
#[derive(Clone, Copy, Debug)]
enum Dropped {
    InTheEpoch,
    /// The epoch has ended before.
    AfterTheEpoch,
    /// The epoch was dropped before, with batches under way.
    AfterAPartOfTheEpoch,
    /// The loader and its epoch were dropped before.
    AfterTheLoader,
}

/// After an epoch nothing of it is allocated, while the loader is still there.
pub fn the_last_batch_is_free_when_its_epoch_has_ended() -> Result<()> {
    use Dropped::{AfterAPartOfTheEpoch, AfterTheEpoch, AfterTheLoader, InTheEpoch};
    let ways = [InTheEpoch, AfterTheEpoch, AfterAPartOfTheEpoch, AfterTheLoader];
    for (workers, dropped) in [0, 2].into_iter().flat_map(|workers| ways.map(|dropped| (workers, dropped))) {
        for pace in [Pace::Eager, Pace::Lazy] {
            let at = || format!("{workers} workers, {dropped:?}, {pace:?}");
            let (left, notes) = watched(pace, || left_reserved(workers, dropped))?;
            ensure!(notes.is_empty(), "{}: {}", at(), notes.join("; "));
            let left = left.with_context(at)?;
            // What small tensors share may have come or gone.
            ensure!(left < FLOATS * 4, "{}: {left} bytes are left", at());
        }
    }
    Ok(())
}

/// Bytes that the driver gave for an epoch, and does not have again after it.
fn left_reserved(workers: usize, dropped: Dropped) -> Result<i64> {
    const BATCHES: i64 = 4;
    cuda::empty_cache()?;
    let rows = Tensor::arange(BATCHES, (Kind::Float, Device::Cpu)).view([BATCHES, 1]).repeat([1, FLOATS]);
    let builder = TensorDataset::new(rows)?.loader().batch_size(1).num_workers(workers);
    let loader = builder.to_device(GPU).build()?;
    let before = cuda::memory_stats(0)?.reserved_bytes;
    let mut epoch = loader.iter();
    let mut sum = Tensor::zeros([], FLOAT);
    let mut held = None;
    let few = if matches!(dropped, Dropped::AfterAPartOfTheEpoch) { 2 } else { BATCHES as usize };
    for batch in epoch.by_ref().take(few) {
        let batch = batch?;
        sum += batch.mean(Kind::Float);
        held = Some(batch).filter(|_| !matches!(dropped, Dropped::InTheEpoch));
    }
    if !matches!(dropped, Dropped::AfterAPartOfTheEpoch) {
        ensure!(epoch.next().is_none(), "one batch too many");
    }
    let mut loader = Some(loader);
    if matches!(dropped, Dropped::AfterAPartOfTheEpoch | Dropped::AfterTheLoader) {
        drop(epoch);
    }
    if matches!(dropped, Dropped::AfterTheLoader) {
        loader = None;
    }
    drop(held);
    cuda::empty_cache()?;
    let left = cuda::memory_stats(0)?.reserved_bytes - before;
    let expected = (0..few).sum::<usize>() as f64;
    ensure!(sum.double_value(&[]) == expected, "the batches' numbers: {sum}");
    drop(loader);
    Ok(left)
}

/// A batch that is taken slowly where a limit is set: until the device holds more than that, for which workers may run
/// ahead, or for [`PATIENCE`].
struct Slow(Tensor);

const PATIENCE: Duration = Duration::from_secs(1);

thread_local! {
    static LIMIT: Cell<Option<i64>> = const { Cell::new(None) };
}

impl TensorBatch for Slow {
    fn map_tensors(&self, change: &mut dyn FnMut(&Tensor) -> Result<Tensor, DataError>) -> Result<Self, DataError> {
        Ok(Self(change(&self.0)?))
    }

    fn visit_tensors<'a>(&'a self, visit: &mut dyn FnMut(&'a Tensor)) {
        if let Some(limit) = LIMIT.get() {
            let (since, held) = (Instant::now(), || cuda::memory_stats(0).map(|it| it.allocated_bytes).unwrap_or(0));
            while held() <= limit && since.elapsed() < PATIENCE {
                sleep(Duration::from_millis(1));
            }
        }
        visit(&self.0);
    }
}

/// Workers that run ahead are held to the budget of the device, which is another one than the host's; also while the
/// training loop takes a batch, and the one before it is still there.
pub fn batches_ahead_take_no_more_than_the_devices_budget() -> Result<()> {
    const AHEAD: i64 = 3;
    const BATCHES: usize = 12;
    let bytes = FLOATS * 4;
    let samples = FnDataset::new(BATCHES, |_| Ok(Tensor::ones([FLOATS], (Kind::Float, Device::Cpu))));
    let builder = DataLoader::builder(samples).batch_size(1).num_workers(2).prefetch_factor(8);
    let builder = builder.collate(|samples: Vec<Tensor>| Ok(Slow(Tensor::stack(&samples, 0))));
    let loader = builder.device_budget((AHEAD * bytes) as usize).to_device(GPU).build()?;
    let before = cuda::memory_stats(0)?.allocated_bytes;
    cuda::reset_peak_memory_stats(0)?;
    // Those ahead, and the one that is taken.
    let most = (AHEAD + 1) * bytes;
    let mut batches = loader.iter();
    for number in 0..BATCHES {
        LIMIT.set((number == BATCHES / 2).then_some(before + most));
        let batch = batches.next().context("a batch is missing");
        LIMIT.set(None);
        drop(batch??);
    }
    ensure!(batches.next().is_none(), "one batch too many");
    let peak = cuda::memory_stats(0)?.allocated_peak_bytes - before;
    ensure!((bytes..=most).contains(&peak), "{peak} bytes of batches of {bytes}, {most} are enough");
    Ok(())
}

/// A cache keeps its samples, and no batch.
pub fn a_cache_on_the_device_keeps_the_samples_alone() -> Result<()> {
    const SAMPLES: i64 = 4;
    cuda::empty_cache()?;
    let before = cuda::memory_stats(0)?.allocated_bytes;
    let samples = TensorDataset::new(Tensor::ones([SAMPLES, FLOATS], (Kind::Float, Device::Cpu)))?;
    let loader = DataLoader::builder(samples).batch_size(2).cache(OnDevice(GPU))?.build()?;
    for epoch in 0..2 {
        loader.iter().try_for_each(|batch| batch.map(drop))?;
        let kept = cuda::memory_stats(0)?.allocated_bytes - before;
        ensure!(kept == SAMPLES * FLOATS * 4, "epoch {epoch}: {kept} bytes");
    }
    Ok(())
}

/// In its first epoch, a worker fills the cache beside the training loop: the copies of the batches that it makes while
/// the device computes do not wait for that computation.
pub fn a_cache_on_the_device_is_filled_beside_the_computation() -> Result<()> {
    // By the device's own clock, a sample is copied in the time of 10 kernels.
    const COPY: f64 = 10.0;
    const KERNELS: usize = 100;
    let microseconds = FLOATS as f64 * 4.0 / 50_000.0 / COPY;
    let fake = fake()?;
    fake.set_pace(Pace::Lazy);
    fake.set_launch_cost(microseconds);
    let ((begun, begins), (go, goes)) = (channel(), channel());
    let gate = Mutex::new((begun, goes));
    // The worker reads two samples, and further ones when it is told to.
    let dataset = FnDataset::new(5, move |index| {
        let ended = |_| DataError::other("the test has ended");
        let gate = gate.lock().unwrap_or_else(PoisonError::into_inner);
        gate.0.send(index).map_err(|_| ended(RecvError))?;
        if index >= 2 {
            gate.1.recv().map_err(ended)?;
        }
        Ok(Tensor::ones([FLOATS], (Kind::Float, Device::Cpu)))
    });
    let builder = DataLoader::builder(dataset).batch_size(1).num_workers(1).prefetch_factor(5);
    let loader = builder.cache(OnDevice(GPU))?.build()?;
    let reaches = |sample| begins.iter().find(|index| *index == sample).context("the worker has ended");
    let mut epoch = loader.iter();
    reaches(2)?;
    let batch = epoch.next().context("no batch")??;
    let (mut begin, mut end) = (TimedEvent::new(0)?, TimedEvent::new(0)?);
    begin.record()?;
    (0..KERNELS).for_each(|_| drop(batch.neg()));
    drop(batch);
    for sample in 2..4 {
        go.send(())?;
        reaches(sample + 1)?;
    }
    end.record()?;
    drop(go);
    drop(epoch);
    tch::Cuda::synchronize(0);
    let kernels = begin.milliseconds_to(&end)? * 1e3 / microseconds;
    ensure!(kernels < KERNELS as f64 + COPY, "until both batches are there, the time of {kernels} kernels");
    Ok(())
}
