//! Memory, threads and file descriptors that remain after epochs that stop early.

use std::sync::Arc;

use anyhow::Result;
use overdrive::dataload::{DataLoader, ImageFolder};
use overdrive_bench_report::{Ratio, Target, VersusRow};

use super::images::{self, Batch};
use super::process::Usage;
use super::{Bench, WORKERS};

const CASE: &str = photographs!("100 epochs over photographs, each broken off after 3 batches, 2 workers");
const EPOCHS: usize = 100;
/// Epochs before the first measurement, in which the allocator gets the memory that it keeps.
const WARM_UP: usize = 20;
const BATCH_SIZE: usize = 16;

pub fn measure(bench: &mut Bench) -> Result<()> {
    let Some(photos) = bench.photos(CASE) else { return Ok(()) };
    let loader = images::loader(&Arc::new(ImageFolder::open(&photos)?), BATCH_SIZE, WORKERS)?;
    eprintln!("resident: {EPOCHS} epochs");
    break_off(&loader, WARM_UP)?;
    let before = Usage::now()?;
    break_off(&loader, EPOCHS)?;
    let after = Usage::now()?;
    for (what, unit, after, before, limit) in [
        ("resident memory", "MiB", after.mebibytes, before.mebibytes, 1.01),
        ("threads", "threads", after.threads, before.threads, 1.0),
        ("descriptors", "descriptors", after.descriptors, before.descriptors, 1.0),
    ] {
        let (text, samples): (_, (&[f64], &[f64])) = (format!("{CASE}: {what}"), (&[after], &[before]));
        let target = Some(Target::AtMost(limit));
        let row = VersusRow::of_pairs(&text, "itself, before them", unit, samples, Ratio::ShareOfCost, target)?;
        bench.findings.rows.push(row.limit());
    }
    Ok(())
}

fn break_off(loader: &DataLoader<Batch>, epochs: usize) -> Result<()> {
    for _ in 0..epochs {
        for batch in loader.iter().take(3) {
            drop(batch?);
        }
    }
    Ok(())
}
