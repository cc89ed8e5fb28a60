//! How a training loop and its loader share the cores: numbers of libtorch's threads and of workers, and the workers'
//! nice value.

use std::fmt;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result};
use overdrive::dataload::{
    ComputeThreads, DataLoader, ImageFolder, ImagePipeline, RandomHorizontalFlip, RandomResizedCrop,
};
use overdrive_bench_report::Ratio;
use tch::{Device, Kind, Tensor};

use super::{Bench, WORKERS};
use crate::versus::turns::{Case, Turns};

const TEXT: &str = photographs!(
    "photographs in batches of 16 beside four products of 768x768 matrices a batch: ours with other settings than the \
     peer's"
);
const BATCH_SIZE: usize = 16;
const BATCHES: usize = 30;
/// The size of the square matrices, and the number of their products per batch.
const SIDE: i64 = 768;
const PRODUCTS: usize = 4;
/// How many threads compute while workers rest.
const ALONE: i32 = 2;

#[derive(Clone, Copy, PartialEq)]
struct Setting {
    torch_threads: i32,
    workers: usize,
    nice: i32,
    /// Whether workers rest in turns, with two of libtorch's threads meanwhile.
    in_turns: bool,
}

impl fmt::Display for Setting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.in_turns {
            true => write!(f, "compute_threads({}, {ALONE})", self.torch_threads)?,
            false => write!(f, "set_num_threads({})", self.torch_threads)?,
        }
        write!(f, ", {} workers, nice {}", self.workers, self.nice)
    }
}

/// The setting that the others are compared with.
const BASELINE: Setting = Setting { torch_threads: 2, workers: WORKERS, nice: 0, in_turns: false };

pub fn measure(bench: &mut Bench) -> Result<()> {
    let Some(photos) = bench.photos(TEXT) else { return Ok(()) };
    let before = tch::get_num_threads();
    let mut settings = vec![BASELINE];
    for (torch_threads, workers, nice) in
        [(2, 0, 0), (2, 1, 0), (2, 1, 10), (2, 2, 10), (2, 2, 19), (1, 1, 0), (1, 2, 0)]
    {
        settings.push(Setting { torch_threads, workers, nice, in_turns: false });
    }
    settings.push(Setting { torch_threads: 1, workers: WORKERS, nice: 10, in_turns: true });
    let names: Vec<String> = settings.iter().map(ToString::to_string).collect();
    let mut turns = Turns::default();
    for (name, &setting) in names.iter().zip(&settings) {
        let loader = loader(&photos, setting)?;
        turns.ours(name, move || rate(&loader, setting));
    }
    turns.take("threads", bench.pairs)?;
    tch::set_num_threads(before);
    for name in &names[1..] {
        let text = format!("{TEXT}: {name}");
        let case = Case { text: &text, unit: "batches/s", ratio: Ratio::TimesFasterByRate };
        turns.compare(&mut bench.findings, case, (name, &names[0]), None)?;
    }
    Ok(())
}

fn loader(photos: &Path, setting: Setting) -> Result<DataLoader<(Tensor, Tensor)>> {
    let crops = ImagePipeline::new(0).then(RandomResizedCrop::new(224)).then(RandomHorizontalFlip::default());
    let builder = DataLoader::builder(ImageFolder::open(photos)?).batch_size(BATCH_SIZE).shuffle(true);
    let builder = builder.num_workers(setting.workers).worker_nice(setting.nice);
    let threads = ComputeThreads { beside_workers: setting.torch_threads, alone: ALONE };
    let builder = if setting.in_turns { builder.compute_threads(threads) } else { builder };
    Ok(builder.collate(crops).build()?)
}

/// Batches per second, each followed by matrix products in place of training. The first batch is not timed.
fn rate(loader: &DataLoader<(Tensor, Tensor)>, setting: Setting) -> Result<f64> {
    tch::set_num_threads(setting.torch_threads);
    let matrix = Tensor::ones([SIDE, SIDE], (Kind::Float, Device::Cpu));
    let mut batches = loader.iter();
    drop(batches.next().context("no photographs")??);
    let started = Instant::now();
    for _ in 0..BATCHES {
        drop(batches.next().context("too few photographs")??);
        for _ in 0..PRODUCTS {
            drop(std::hint::black_box(matrix.matmul(&matrix)));
        }
    }
    Ok(BATCHES as f64 / started.elapsed().as_secs_f64())
}
