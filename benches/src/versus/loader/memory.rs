//! Small samples in memory. Nothing is decoded, so this measures the loader's own cost.

use std::time::Instant;

use anyhow::Result;
use overdrive::dataload::{DataError, DataLoader, TensorDataset};
use overdrive_bench_report::{Ratio, Target};
use serde_json::json;
use tch::{Device, Kind, Tensor};

use super::{Bench, WORKERS};
use crate::versus::turns::{Case, Program, Turns};

const CASE: &str = "60,000 28x28 uint8 samples in memory, batch 128, shuffled";
const SAMPLES: i64 = 60_000;
const BATCH_SIZE: i64 = 128;
/// Epochs per measurement, which then takes a tenth of a second or more.
const EPOCHS: u32 = 5;

type Batch = (Tensor, Tensor);

/// Random images and labels.
pub struct Data {
    images: Tensor,
    labels: Tensor,
}

impl Data {
    pub fn random() -> Result<Self> {
        let images = Tensor::f_randint(256, [SAMPLES, 1, 28, 28], (Kind::Uint8, Device::Cpu))?;
        Ok(Self { images, labels: Tensor::f_randint(10, [SAMPLES], (Kind::Int64, Device::Cpu))? })
    }

    pub fn loader(&self, workers: usize) -> Result<DataLoader<Batch>, DataError> {
        let data = TensorDataset::new((self.images.shallow_clone(), self.labels.shallow_clone()))?;
        data.loader().batch_size(BATCH_SIZE as usize).shuffle(true).num_workers(workers).build()
    }

    /// An epoch in the simplest loop: a permutation, and one `index_select` per batch. Returns the number of samples.
    fn index_select(&self) -> Result<i64> {
        let order = Tensor::f_randperm(SAMPLES, (Kind::Int64, Device::Cpu))?;
        let mut seen = 0;
        while seen < SAMPLES {
            let rows = order.f_narrow(0, seen, BATCH_SIZE.min(SAMPLES - seen))?;
            let batch = (self.images.f_index_select(0, &rows)?, self.labels.f_index_select(0, &rows)?);
            seen += batch.1.size()[0];
        }
        Ok(seen)
    }
}

pub fn torch(bench: &mut Bench) -> Program {
    let options = json!({ "samples": SAMPLES, "batch_size": BATCH_SIZE, "workers": WORKERS });
    bench.torch(include_str!("../../../peers/loader_memory.py"), &options)
}

pub fn measure(bench: &mut Bench) -> Result<()> {
    let program = torch(bench);
    let data = Data::random()?;
    let (loader, threads) = (data.loader(0)?, tch::get_num_threads());
    let mut turns = Turns::default();
    turns.ours("ours", || rate(|| loader.iter().try_fold(0, |seen, batch| Ok(seen + batch?.1.size()[0]))));
    turns.ours("one index_select a batch, 1 thread", || {
        tch::set_num_threads(1);
        rate(|| data.index_select())
    });
    turns.ours("one index_select a batch, libtorch's threads", || {
        tch::set_num_threads(threads);
        rate(|| data.index_select())
    });
    turns.peer("DataLoader, its fastest way", &program, |peer| {
        Ok(SAMPLES as f64 * f64::from(EPOCHS) / peer.measure("best", EPOCHS)?)
    });
    turns.take("memory", bench.pairs)?;

    let faster = Case { text: CASE, unit: "samples/s", ratio: Ratio::TimesFasterByRate };
    let (peer, target) = ("DataLoader, its fastest way", Target::AtLeast(5.0));
    turns.compare(&mut bench.findings, faster, ("ours", peer), Some(target))?;
    let share = Case { ratio: Ratio::ShareOfRate, ..faster };
    for peer in ["one index_select a batch, 1 thread", "one index_select a batch, libtorch's threads"] {
        turns.compare(&mut bench.findings, share, ("ours", peer), Some(Target::AtLeast(0.8)))?;
    }
    Ok(())
}

/// Samples per second.
fn rate(mut epoch: impl FnMut() -> Result<i64>) -> Result<f64> {
    let started = Instant::now();
    let mut seen = 0;
    for _ in 0..EPOCHS {
        seen += epoch()?;
    }
    Ok(seen as f64 / started.elapsed().as_secs_f64())
}
