//! The samples, their order, and their windows.

use std::sync::LazyLock;

use anyhow::Result;
use overdrive::dataload::{
    DataError, DistributedSampler, FnDataset, RandomSampler, Sampler, SequentialSampler, WeightedRandomSampler,
};
use overdrive::prelude::*;

use crate::choices::{Accum, Cell, Data, Ranks};
use crate::{CPU, DOUBLE};

pub const SAMPLES: usize = 28;
pub const EPOCHS: u64 = 2;
/// Micro-batches per window.
pub const STEPS: usize = 3;

/// The indices of its samples.
pub type Batch = Vec<usize>;
pub type Loader = DataLoader<Batch>;

struct Samples {
    inputs: Vec<[f64; 3]>,
    targets: Vec<[f64; 2]>,
}

static DATA: LazyLock<Samples> = LazyLock::new(|| {
    let wave = |index: usize, by: f64| (index as f64 * by).sin();
    Samples {
        inputs: (0..SAMPLES).map(|it| [wave(it, 0.7), wave(it, 1.9) + 0.3, wave(it, 3.1)]).collect(),
        targets: (0..SAMPLES).map(|it| [2.0 * wave(it, 0.5), wave(it, 1.1) - 0.5]).collect(),
    }
});

/// The weight of a sample in the mean: with tokens from 0 to 3, so that some micro-batches count 0.
fn count_of(cell: &Cell, sample: usize) -> i64 {
    match cell.accumulator {
        Accum::Tokens if sample % 14 < 4 => 0,
        Accum::Tokens => (sample % 3 + 1) as i64,
        _ => 1,
    }
}

/// Inputs, targets, and weights of the mean.
pub fn tensors(cell: &Cell, batch: &[usize]) -> (Tensor, Tensor, Tensor) {
    let rows = |row: &dyn Fn(usize) -> Vec<f64>, width: i64| {
        let all: Vec<f64> = batch.iter().flat_map(|&sample| row(sample)).collect();
        Tensor::from_slice(&all).view([batch.len() as i64, width])
    };
    let counts: Vec<f64> = batch.iter().map(|&sample| count_of(cell, sample) as f64).collect();
    (
        rows(&|sample| DATA.inputs[sample].to_vec(), 3),
        rows(&|sample| DATA.targets[sample].to_vec(), 2),
        Tensor::from_slice(&counts),
    )
}

pub fn count(cell: &Cell, batch: &[usize]) -> i64 {
    batch.iter().map(|&sample| count_of(cell, sample)).sum()
}

/// The weighted sum of the samples' losses; divided by the count it is the mean.
pub fn summed_loss(outputs: &Tensor, targets: &Tensor, weights: &Tensor) -> Tensor {
    let of_samples = (outputs.to_kind(Kind::Double) - targets).square().mean_dim(-1, false, Kind::Double);
    (of_samples * weights).sum(Kind::Double)
}

/// A loader of this rank's samples. `is_plain`: without workers, for the reference.
pub fn loader(cell: &Cell, rank: usize, is_plain: bool) -> Result<Loader> {
    let is_bad = |sample: usize| matches!(sample, 3 | 8 | 9 | 17);
    let skips = cell.data != Data::Plain;
    let samples = FnDataset::new(SAMPLES, move |sample| match skips && is_bad(sample) {
        true => Err(DataError::other(format!("sample {sample} is bad"))),
        false => Ok(sample),
    });
    let weights: Vec<f64> = (0..SAMPLES).map(|sample| 1.0 + (sample % 4) as f64).collect();
    let sampler: Box<dyn Sampler> = match cell.data {
        Data::Plain => Box::new(SequentialSampler::new(SAMPLES)),
        Data::Skip => Box::new(RandomSampler::new(SAMPLES, 11)),
        Data::Replace => Box::new(WeightedRandomSampler::new(weights, SAMPLES, 12)?),
    };
    let (policy, workers) = match cell.data {
        Data::Plain => (OnError::Fail, 0),
        Data::Skip => (OnError::Skip, 0),
        Data::Replace => (OnError::Replace, 2),
    };
    // Communication between ranks dominates a step: larger batches give fewer steps when there are no windows.
    let batch = if cell.accumulator == Accum::Off { 4 } else { 2 };
    let loader = DataLoader::builder(samples).batch_size(batch).on_error(policy).seed(13);
    let loader = loader.num_workers(if is_plain { 0 } else { workers }).collate(|batch: Batch| Ok(batch));
    Ok(match cell.ranks {
        Ranks::Alone => loader.sampler(sampler).build()?,
        _ => loader.sampler(DistributedSampler::new(sampler, 2, rank)?).build()?,
    })
}

/// One rank's batches of the whole run, by window, and which windows end an epoch.
pub struct Windows {
    pub windows: Vec<Vec<Batch>>,
    pub ends_epoch: Vec<bool>,
}

/// The windows of all ranks.
pub fn all_windows(cell: &Cell) -> Result<Vec<Windows>> {
    let ranks = if cell.ranks == Ranks::Alone { 1 } else { 2 };
    (0..ranks).map(|rank| windows(cell, rank)).collect()
}

/// One rank's windows, from a loop without look-ahead, resume or workers.
fn windows(cell: &Cell, rank: usize) -> Result<Windows> {
    let steps = if cell.accumulator == Accum::Off { 1 } else { STEPS };
    let loader = loader(cell, rank, true)?;
    let mut all = Windows { windows: Vec::new(), ends_epoch: Vec::new() };
    for epoch in 0..EPOCHS {
        let batches = loader.epoch(epoch).collect::<Result<Vec<_>, _>>()?;
        for window in batches.chunks(steps) {
            all.windows.push(window.to_vec());
            all.ends_epoch.push(false);
        }
        if let Some(last) = all.ends_epoch.last_mut() {
            *last = true;
        }
    }
    Ok(all)
}

/// The result of a run.
#[derive(Debug)]
pub struct Trained {
    pub weights: Vec<(String, Tensor)>,
    pub averages: Vec<(String, Tensor)>,
    pub rates: Vec<f64>,
    pub scale: f64,
    pub windows: usize,
    /// How many steps were skipped for an overflow; only the reference counts them.
    pub skipped: usize,
}

impl Trained {
    /// Whether all numbers are equal bit for bit.
    pub fn equals(&self, other: &Self) -> bool {
        let same = |one: &[(String, Tensor)], other: &[(String, Tensor)]| {
            one.len() == other.len()
                && one.iter().zip(other).all(|(one, other)| one.0 == other.0 && one.1.equal(&other.1))
        };
        let rest = (&self.rates, self.scale, self.windows) == (&other.rates, other.scale, other.windows);
        rest && same(&self.weights, &other.weights) && same(&self.averages, &other.averages)
    }
}

/// A weight before training.
pub fn initial(name: &str) -> Tensor {
    let (shape, by): (&[i64], f64) = match name {
        "hidden.weight" => (&[4, 3], 1.3),
        "hidden.bias" => (&[4], 2.1),
        "out.weight" => (&[2, 4], 0.9),
        _ => (&[2], 1.7),
    };
    let count: i64 = shape.iter().product();
    // Rounded to few bits, so that a bfloat16 model has the same initial weights.
    let values = ((Tensor::arange(count, DOUBLE) * by).sin() * 64.0).round() / 64.0;
    values.reshape(shape).to_device(CPU)
}

pub const NAMES: [&str; 4] = ["hidden.weight", "hidden.bias", "out.weight", "out.bias"];
