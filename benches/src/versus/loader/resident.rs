//! Memory, threads and file descriptors that remain after epochs that stop early, and memory over many batches.

use std::sync::Arc;

use anyhow::Result;
use overdrive::dataload::{DataLoader, FnDataset, ImageFolder};
use overdrive_bench_report::{Ratio, Target, VersusRow};
use tch::Tensor;

use super::images::{self, Batch};
use super::process::Usage;
use super::{Bench, WORKERS};

const CASE: &str = photographs!("100 epochs over photographs, each broken off after 3 batches, 2 workers");
const EPOCHS: usize = 100;
/// Epochs before the first measurement, in which the allocator gets the memory that it keeps.
const WARM_UP: usize = 20;
const BATCH_SIZE: usize = 16;

const LASTING: &str =
    "200,000 batches of 16 samples of up to 64 kB, 8 workers: the peak of resident memory in the last quarter";
const SECOND: &str = "the peak in the second quarter and 16 MiB";
const BATCHES: usize = 200_000;
const MOST_BYTES: usize = 64 << 10;

pub fn measure(bench: &mut Bench) -> Result<()> {
    lasting(bench)?;
    broken_off(bench)
}

/// Whether memory grows in a run of many batches, which are all of another size.
fn lasting(bench: &mut Bench) -> Result<()> {
    let samples = FnDataset::new(BATCHES * BATCH_SIZE, |index: usize| {
        // As random as it needs to be: a number that is prime to it.
        let bytes = 1 + index.wrapping_mul(40_503) % MOST_BYTES;
        Ok(vec![index as u8; bytes])
    });
    let join = |samples: Vec<Vec<u8>>| Ok(Tensor::f_from_slice(&samples.concat())?);
    let loader = DataLoader::builder(samples).batch_size(BATCH_SIZE).num_workers(8).collate(join).build()?;
    eprintln!("resident: {BATCHES} batches");
    let mut peaks = [0_f64; 4];
    for (number, batch) in loader.iter().enumerate() {
        drop(batch?);
        if number % 20 == 0 {
            let peak = &mut peaks[4 * number / BATCHES];
            *peak = peak.max(Usage::now()?.mebibytes);
        }
    }
    let [last, second] = [peaks[3], peaks[1] + 16.0];
    let target = Some(Target::AtMost(1.0));
    let samples: (&[f64], &[f64]) = (&[last], &[second]);
    let row = VersusRow::of_pairs(LASTING, SECOND, "MiB", samples, Ratio::ShareOfCost, target)?;
    bench.findings.rows.push(row.limit());
    Ok(())
}

fn broken_off(bench: &mut Bench) -> Result<()> {
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
