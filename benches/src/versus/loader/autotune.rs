//! The speed of a loader that tunes its workers and prefetching in its first batches, against the best setting of a
//! grid.

use std::hint::black_box;
use std::num::Wrapping;
use std::thread::{available_parallelism, sleep};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use overdrive::dataload::{Auto, Collate, DataLoader, DataLoaderBuilder, Dataset, FnDataset, FromDataset};
use overdrive_bench_report::{Ratio, Target};

use super::Bench;
use crate::versus::turns::{Case, Turns};

const ALONE: &str = "batches of 32 samples that cost a core 0.2 ms each, taken as fast as they come: workers and \
                     prefetching tuned in 50 batches, beside the best of a grid";
const BEHIND: &str = "the same, taken by a loop that waits 4 ms for a device with each";
const BATCH_SIZE: usize = 32;
/// Batches in which the loader tunes itself, and the timed batches after them.
const TUNING: usize = 50;
const COUNTED: usize = 100;
const PREFETCH: [usize; 4] = [1, 2, 4, 8];

pub fn measure(bench: &mut Bench) -> Result<()> {
    for (text, device) in [(ALONE, Duration::ZERO), (BEHIND, Duration::from_millis(4))] {
        let (workers, prefetch) = best_of_grid(device)?;
        let best = format!("the best of a grid: {workers} workers, prefetch {prefetch}");
        let mut turns = Turns::default();
        turns.ours("tuned", || rate(&builder().num_workers(Auto).prefetch(Auto).build()?, device));
        turns.ours(&best, || rate(&builder().num_workers(workers).prefetch_factor(prefetch).build()?, device));
        turns.take("autotune", bench.pairs)?;
        let case = Case { text, unit: "batches/s", ratio: Ratio::ShareOfRate };
        turns.compare(&mut bench.findings, case, ("tuned", &best), Some(Target::AtLeast(0.95)))?;
    }
    Ok(())
}

fn best_of_grid(device: Duration) -> Result<(usize, usize)> {
    eprintln!("autotune: a grid of workers and prefetching");
    let cores = available_parallelism().map_or(1, usize::from);
    let mut best: Option<(f64, usize, usize)> = None;
    for workers in 0..=cores {
        for &prefetch in PREFETCH.iter().filter(|&&prefetch| workers > 0 || prefetch == 1) {
            let rate = rate(&builder().num_workers(workers).prefetch_factor(prefetch).build()?, device)?;
            if best.is_none_or(|(fastest, ..)| rate > fastest) {
                best = Some((rate, workers, prefetch));
            }
        }
    }
    best.map(|(_, workers, prefetch)| (workers, prefetch)).context("the grid is empty")
}

type Builder<D, C> = DataLoaderBuilder<FromDataset<D>, C>;

fn builder() -> Builder<impl Dataset<Sample = u64> + 'static, impl Collate<u64, Batch = Vec<u64>> + 'static> {
    let samples = FnDataset::new((TUNING + COUNTED) * BATCH_SIZE, |index| Ok(busy(index as u64)));
    DataLoader::builder(samples).batch_size(BATCH_SIZE).collate(|samples: Vec<u64>| Ok(samples))
}

/// Keeps a core busy for about 0.2 ms.
fn busy(seed: u64) -> u64 {
    let mut state = Wrapping(black_box(seed));
    for _ in 0..100_000 {
        state = state * Wrapping(6_364_136_223_846_793_005) + Wrapping(1_442_695_040_888_963_407);
        state ^= state >> 29;
    }
    state.0
}

/// Batches per second in a new loader's first epoch, after `TUNING` batches. For each batch, the loop waits `device`.
fn rate(loader: &DataLoader<Vec<u64>>, device: Duration) -> Result<f64> {
    let mut batches = loader.iter();
    let mut take = |count| {
        for _ in 0..count {
            black_box(batches.next().context("the epoch has too few batches")??);
            if !device.is_zero() {
                sleep(device);
            }
        }
        anyhow::Ok(())
    };
    take(TUNING)?;
    let started = Instant::now();
    take(COUNTED)?;
    Ok(COUNTED as f64 / started.elapsed().as_secs_f64())
}
