//! The time from making a loader to its first batch. It includes starting the workers.

use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use overdrive::dataload::{DataError, DataLoader, ImageFolder};
use overdrive_bench_report::{Ratio, Target};

use super::images::{self, BATCH_SIZE};
use super::{Bench, WORKERS, memory};
use crate::versus::turns::{Case, Turns};

const SAMPLES: &str = "start-up to the first batch with 2 workers: 60,000 28x28 samples in memory, batch 128";
const PHOTOS: &str = photographs!("start-up to the first batch with 2 workers: photographs, batch 64");
const LARGE: &str = photographs!("start-up to the first batch with 2 workers: photographs, batch 256");
const TARGET: Option<Target> = Some(Target::AtLeast(10.0));

pub fn measure(bench: &mut Bench) -> Result<()> {
    let program = memory::torch(bench);
    let data = memory::Data::random()?;
    let mut turns = Turns::default();
    turns.ours("ours", || first_batch(|| data.loader(WORKERS)));
    turns.peer("DataLoader", &program, |peer| Ok(1e3 * peer.measure("startup", 1)?));
    turns.take("start-up, samples in memory", bench.pairs)?;
    let case = Case { text: SAMPLES, unit: "ms", ratio: Ratio::TimesFasterByTime };
    turns.compare(&mut bench.findings, case, ("ours", "DataLoader"), TARGET)?;

    let Some(photos) = bench.photos(PHOTOS) else { return Ok(()) };
    let folder = Arc::new(ImageFolder::open(&photos)?);
    for (text, batch_size, target) in [(PHOTOS, BATCH_SIZE, 10.0), (LARGE, 256, 3.34)] {
        let program = images::torch(bench, &photos, "startup", batch_size, true);
        let mut turns = Turns::default();
        turns.ours("ours", || first_batch(|| images::loader(&folder, batch_size, WORKERS)));
        turns.peer("DataLoader", &program, |peer| Ok(1e3 * peer.measure("startup", 1)?));
        turns.take(&format!("start-up, photographs by {batch_size}"), bench.pairs)?;
        let case = Case { text, ..case };
        turns.compare(&mut bench.findings, case, ("ours", "DataLoader"), Some(Target::AtLeast(target)))?;
    }
    Ok(())
}

/// Milliseconds from making a loader to its first batch.
pub fn first_batch<B: Send + 'static>(make: impl FnOnce() -> Result<DataLoader<B>, DataError>) -> Result<f64> {
    let started = Instant::now();
    let loader = make()?;
    let mut batches = loader.iter();
    batches.next().context("the loader gave no batch")??;
    Ok(1e3 * started.elapsed().as_secs_f64())
}
