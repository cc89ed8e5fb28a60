//! `versus optim`: optimizer steps and gradient clipping over the parameters of real models, against PyTorch and plain
//! tch, all on one thread.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::Result;
use overdrive::optim::{AdamW8Bit, ClipGradNorm};
use overdrive::prelude::*;
use overdrive_bench_report::{Machine, Ratio, Target, VersusReport};
use serde_json::json;
use tch::nn::{self, OptimizerConfig, VarStore};

use super::Options;
use super::turns::{Case, Findings, Program, Turns};

const PAIRS: u32 = 15;
/// The width of GPT-2-small.
const WIDTH: i64 = 768;

/// The shapes of a model's parameters, and the number of steps per sample.
struct Model {
    name: &'static str,
    shapes: Vec<Vec<i64>>,
    steps: u32,
}

pub fn measure(options: &Options) -> Result<VersusReport> {
    tch::set_num_threads(1);
    let ours = [("overdrive", env!("CARGO_PKG_VERSION")), ("tch", "0.24.0"), ("libtorch", "2.11.0")];
    let mut versions = ours.map(|(name, version)| (name.to_owned(), version.to_owned())).into();
    let mut findings = Findings::default();
    for model in [resnet50(), gpt2_small()] {
        steps(&model, options, &mut versions, &mut findings)?;
    }
    Ok(findings.report(Machine::detect(None), versions))
}

fn resnet50() -> Model {
    let vs = VarStore::new(Device::Cpu);
    let _model = tch::vision::resnet::resnet50(&vs.root(), 1000);
    Model { name: "ResNet-50", shapes: vs.trainable_variables().iter().map(Tensor::size).collect(), steps: 3 }
}

/// 124 million parameters; the output layer shares the weight of the embedding.
fn gpt2_small() -> Model {
    let mut shapes = vec![vec![50_257, WIDTH], vec![1024, WIDTH]];
    shapes.extend(gpt2_blocks());
    shapes.extend([vec![WIDTH], vec![WIDTH]]);
    Model { name: "GPT-2-small", shapes, steps: 1 }
}

/// GPT-2-small's twelve transformer blocks: 85 million parameters.
pub fn gpt2_blocks() -> Vec<Vec<i64>> {
    let block = [
        [vec![WIDTH], vec![WIDTH], vec![WIDTH, 3 * WIDTH], vec![3 * WIDTH]],
        [vec![WIDTH, WIDTH], vec![WIDTH], vec![WIDTH], vec![WIDTH]],
        [vec![WIDTH, 4 * WIDTH], vec![4 * WIDTH], vec![4 * WIDTH, WIDTH], vec![WIDTH]],
    ]
    .concat();
    vec![block; 12].concat()
}

fn steps(
    model: &Model,
    options: &Options,
    versions: &mut BTreeMap<String, String>,
    findings: &mut Findings,
) -> Result<()> {
    let Model { name, shapes, steps } = model;
    let peer = include_str!("../../peers/optim.py");
    let program = Program::start(&options.python, peer, &json!({ "shapes": shapes }), "see `cargo xtask setup`");
    if let Some(version) = program.version() {
        versions.insert("torch (Python)".to_owned(), version);
    }
    // Our optimizers and tch's update the same parameters; each has its own state.
    let vs = VarStore::new(Device::Cpu);
    params(&vs, shapes);
    let variables = vs.trainable_variables();
    let mut fused = AdamW::builder(&variables).lr(1e-3).build()?;
    let mut foreach = AdamW::builder(&variables).lr(1e-3).foreach(true).build()?;
    let mut eight_bit = AdamW8Bit::builder(&variables).lr(1e-3).build()?;
    let mut theirs = nn::AdamW::default().build(&vs, 1e-3)?;

    // Calls so far: the maximum norm of "clip" shrinks with each, so that there is always something to clip.
    let calls = Cell::new(0);
    let clip = |max_norm: f64| {
        drop(ClipGradNorm::new(max_norm).clip_(&variables)?);
        Ok(())
    };

    let mut turns = Turns::default();
    turns.ours("fused", || time(*steps, || Ok(fused.step()?)));
    turns.peer("PyTorch, fused", &program, |peer| Ok(peer.measure("fused", *steps)? * 1e3 / f64::from(*steps)));
    turns.ours("plain tch, its own AdamW", || {
        time(*steps, || {
            theirs.step();
            Ok(())
        })
    });
    turns.ours("foreach", || time(*steps, || Ok(foreach.step()?)));
    turns.peer("PyTorch, foreach", &program, |peer| Ok(peer.measure("foreach", *steps)? * 1e3 / f64::from(*steps)));
    turns.ours("8-bit", || time(*steps, || Ok(eight_bit.step()?)));

    turns.ours("clip", || {
        time(*steps, || {
            calls.set(calls.get() + 1);
            clip(1e3 * 0.95f64.powi(calls.get()))
        })
    });
    turns.peer("PyTorch", &program, |peer| Ok(peer.measure("clip", *steps)? * 1e3 / f64::from(*steps)));
    turns.ours("leave", || time(*steps, || clip(1e9)));
    turns.peer("PyTorch ", &program, |peer| Ok(peer.measure("leave", *steps)? * 1e3 / f64::from(*steps)));
    turns.take(&format!("optim, {name}"), options.pairs.unwrap_or(PAIRS))?;

    let millions = shapes.iter().map(|shape| shape.iter().product::<i64>()).sum::<i64>() as f64 / 1e6;
    let of = format!("{name}'s {} tensors, {millions:.1} million parameters, one thread", shapes.len());
    let mut row = |what: &str, ratio, pair, target| {
        turns.compare(findings, Case { text: &format!("{what} over {of}"), unit: "ms", ratio }, pair, target)
    };
    let (cost, faster) = (Ratio::ShareOfCost, Ratio::TimesFasterByTime);
    row("fused AdamW step", cost, ("fused", "PyTorch, fused"), Some(Target::AtMost(1.05)))?;
    row("fused AdamW step", faster, ("fused", "plain tch, its own AdamW"), Some(Target::AtLeast(2.5)))?;
    row("foreach AdamW step", cost, ("foreach", "PyTorch, foreach"), Some(Target::AtMost(1.0)))?;
    row("8-bit AdamW step", cost, ("8-bit", "fused"), None)?;
    row("clip_grad_norm_ that clips", cost, ("clip", "PyTorch"), Some(Target::AtMost(1.0)))?;
    row("clip_grad_norm_ that leaves gradients as they are", cost, ("leave", "PyTorch "), Some(Target::AtMost(1.0)))
}

/// Milliseconds per step.
fn time(steps: u32, mut step: impl FnMut() -> Result<()>) -> Result<f64> {
    let started = Instant::now();
    for _ in 0..steps {
        step()?;
    }
    Ok(started.elapsed().as_secs_f64() * 1e3 / f64::from(steps))
}

/// Adds parameters of the given shapes to `vs`, with random gradients.
pub fn params(vs: &VarStore, shapes: &[Vec<i64>]) {
    for (index, shape) in shapes.iter().enumerate() {
        let param = vs.root().randn(&format!("p{index}"), shape, 0.0, 1.0);
        (&param * param.randn_like().detach()).sum(Kind::Float).backward();
    }
}
