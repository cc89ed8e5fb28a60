//! What it costs to find that a batch does not fit.

use std::cell::Cell;
use std::time::Instant;

use anyhow::{Result, ensure};
use overdrive::core::Optimizer;
use overdrive::ffi::host_memory;
use overdrive::memory::AutoMicroBatch;
use overdrive::prelude::*;
use overdrive_bench_report::{Ratio, Target};

use super::super::turns::{Case, Findings, Turns};
use super::{BATCH, Model};

/// Ends the limit, also after an error.
struct Limit;

impl Drop for Limit {
    fn drop(&mut self) {
        // It has succeeded before.
        let _ = host_memory::count(usize::MAX);
    }
}

/// The seconds that a batch takes which does not fit and is halved beyond those of one that was halved before, and those.
fn back_off(model: &Model, opt: &mut impl Optimizer) -> Result<[f64; 2]> {
    let batch = [model.tokens.shallow_clone(), model.targets.view([BATCH, -1])];
    let mut pass = |micro: &mut AutoMicroBatch| -> Result<f64> {
        let begun = Instant::now();
        drop(micro.backward(opt, &batch, |part| model.loss_of(&part[0], &part[1].reshape([-1])))?);
        Ok(begun.elapsed().as_secs_f64())
    };
    host_memory::reset_peak()?;
    let before = host_memory::stats()?.allocated;
    pass(&mut AutoMicroBatch::new(BATCH as usize))?;
    // Three quarters of what the whole batch takes.
    let most = before + (host_memory::stats()?.peak - before) * 3 / 4;
    let _limit = Limit;
    host_memory::count(usize::try_from(most)?)?;
    let mut micro = AutoMicroBatch::new(BATCH as usize);
    let first = pass(&mut micro)?;
    ensure!(micro.size() == BATCH as usize / 2, "the batch was parted into {}", micro.size());
    let next = pass(&mut micro)?;
    Ok([(first - next).max(1e-12), next])
}

pub fn cost(findings: &mut Findings, model: &Model, pairs: u32) -> Result<()> {
    let mut opt = Sgd::builder(&model.gpt).build()?;
    let step = Cell::new(0.0);
    let mut turns = Turns::default();
    turns.ours("ours", || {
        let [cost, next] = back_off(model, &mut opt)?;
        step.set(next);
        Ok(cost)
    });
    turns.ours("a batch in two parts", || Ok(step.get()));
    turns.take("back-off", pairs)?;
    let text = "time until a batch that does not fit is computed in two parts, beyond that of the parts";
    let case = Case { text, unit: "s", ratio: Ratio::ShareOfCost };
    turns.compare(findings, case, ("ours", "a batch in two parts"), Some(Target::AtMost(2.0)))
}
