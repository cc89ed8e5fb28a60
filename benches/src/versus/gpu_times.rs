//! `versus gpu-times`: the time of a training step on a GPU, from the host's first call to the end of the device's work,
//! beside PyTorch's eager mode with fused AdamW and plain tch, each on one thread of the host. The steps are those that
//! `gpu-counts` counts: their kernels are small.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::{Result, bail};
use overdrive::ffi::cuda;
use overdrive::tch::{Cuda, Device};
use overdrive_bench_report::{Machine, Ratio, VersusReport};

use super::Options;
use super::peer::Peer;
use super::turns::{Case, Findings, Program, Turns};
use crate::gpu_steps::{Recipe, ours, plain_tch};

const PAIRS: u32 = 15;
const PYTORCH: &str = "PyTorch, fused AdamW";
const PLAIN_TCH: &str = "plain tch";
/// Models, and steps a sample: some tenths of a second.
const STEPS: [(&str, u32); 3] = [("mlp", 300), ("cnn", 200), ("gpt", 100)];
/// A step with all techniques has 4 micro-batches, so a sample has a quarter of the steps.
const MICRO_BATCHES: u32 = 4;

pub fn measure(options: &Options) -> Result<VersusReport> {
    if let Some(why) = cuda::why_unavailable() {
        bail!("gpu-times needs a GPU: {why}; `host-time` measures the host's part without one");
    }
    overdrive::tch::set_num_threads(1);
    let plain = STEPS.map(|(model, steps)| (Recipe::new(model, "AdamW"), steps));
    let all = STEPS.map(|(model, steps)| (Recipe::new(model, "AdamW").with_all(), steps / MICRO_BATCHES));
    let recipes: Vec<(Recipe, u32)> = plain.into_iter().chain(all).collect();
    let asked: Vec<&Recipe> = recipes.iter().map(|(recipe, _)| recipe).collect();
    let args = [serde_json::to_string(&asked)?];
    let peer = Peer::start(&options.python, include_str!("../../peers/gpu_counts.py"), &args);
    let program = Program::together(peer, "a Python with torch 2.11.0 is needed");

    let mut versions = BTreeMap::from([("overdrive".to_owned(), env!("CARGO_PKG_VERSION").to_owned())]);
    versions.extend(program.version().map(|version| ("torch (Python)".to_owned(), version)));
    let mut findings = Findings::default();
    for (index, (recipe, steps)) in recipes.iter().enumerate() {
        let mut turns = Turns::default();
        turns.ours("ours", timed(ours::step(recipe, Device::Cuda(0))?, *steps));
        if plain_tch::has(recipe) {
            turns.ours(PLAIN_TCH, timed(plain_tch::step(recipe, Device::Cuda(0))?, *steps));
        }
        let request = format!("wall-{index}");
        let theirs = move |peer: &mut Peer| Ok(peer.measure(&request, *steps)? * 1e6 / f64::from(*steps));
        turns.peer(PYTORCH, &program, theirs);
        turns.take(&recipe.name(), options.pairs.unwrap_or(PAIRS))?;
        let text = format!("step, {}", recipe.name());
        let case = Case { text: &text, unit: "us", ratio: Ratio::ShareOfCost };
        turns.compare(&mut findings, case, ("ours", PYTORCH), None)?;
        if plain_tch::has(recipe) {
            turns.compare(&mut findings, case, ("ours", PLAIN_TCH), None)?;
        }
    }
    Ok(findings.report(Machine::detect(cuda::device_name(0).ok()), versions))
}

/// Microseconds a step, of so many.
fn timed(step: ours::Step, steps: u32) -> impl FnMut() -> Result<f64> {
    let step = RefCell::new(step);
    move || {
        Cuda::synchronize(0);
        let begun = Instant::now();
        for _ in 0..steps {
            drop((step.borrow_mut().train)()?);
        }
        Cuda::synchronize(0);
        Ok(begun.elapsed().as_secs_f64() * 1e6 / f64::from(steps))
    }
}
