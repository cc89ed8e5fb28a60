//! `versus step`: the time of a small training step and of an AdamW step, against plain tch and Python's PyTorch, all
//! on one thread.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::Result;
use overdrive::prelude::*;
use overdrive_bench_report::{Machine, MissingPeer, Ratio, Target, VersusReport, VersusRow};
use tch::nn::{self, OptimizerConfig, VarStore};

use super::Options;
use super::peer::Peer;
use super::step_nn;
use super::turns::Findings;
use crate::model::{Mlp, cross_entropy};

const MLP: &str = "train step of an MLP 784-128-128-10, batch 16, SGD, one thread";
const ADAMW: &str = "AdamW step over ResNet-18's 62 parameters, one thread";
const MLP_MODULES: &str = "the same MLP through overdrive-nn, its step with our SGD, one thread";
const GPT_MODULES: &str = "train step of a GPT of 2 blocks 64 wide, 4 x 32 tokens, through overdrive-nn, one thread";
const WIDTHS: [i64; 4] = [784, 128, 128, 10];
/// Steps per sample, so that a sample takes tens of milliseconds.
const MLP_STEPS: u32 = 150;
const ADAMW_STEPS: u32 = 5;
/// A quarter of a second each: what modules cost is less than the noise of shorter ones.
const MLP_MODULES_STEPS: u32 = 1500;
const GPT_STEPS: u32 = 150;
const PAIRS: u32 = 31;

pub(super) type Step = Box<dyn FnMut() -> Result<()>>;

pub fn measure(options: &Options) -> Result<VersusReport> {
    tch::set_num_threads(1);
    let resnet = VarStore::new(Device::Cpu);
    let _model = tch::vision::resnet::resnet18(&resnet.root(), 1000);
    let shapes: Vec<Vec<i64>> = resnet.trainable_variables().iter().map(Tensor::size).collect();

    let args = ["1".to_owned(), serde_json::to_string(&shapes)?];
    let peer = Peer::start(&options.python, include_str!("../../peers/step.py"), &args);
    let mut versions = BTreeMap::from([("overdrive".to_owned(), env!("CARGO_PKG_VERSION").to_owned())]);
    versions.insert("tch".to_owned(), "0.24.0".to_owned());
    versions.insert("libtorch".to_owned(), "2.11.0".to_owned());
    let (mut peer, missing) = match peer {
        Ok(peer) => {
            versions.insert("torch (Python)".to_owned(), peer.version().to_owned());
            (Some(peer), Vec::new())
        }
        Err(error) => {
            let reason = format!("{error:#}");
            let missing = |case: &str| MissingPeer {
                case: case.to_owned(),
                peer_name: "PyTorch".to_owned(),
                reason: reason.clone(),
            };
            (None, vec![missing(MLP), missing(ADAMW)])
        }
    };

    let mut mlp = Contest::new(mlp_ours()?, ("tch", mlp_tch()?), &["mlp_default", "mlp_fused"], MLP_STEPS)?;
    let mut adamw = Contest::new(
        adamw_ours(&shapes)?,
        ("tch", adamw_tch(&shapes)?),
        &["adamw_fused", "adamw_foreach"],
        ADAMW_STEPS,
    )?;
    let tch_modules = |step| ("tch's modules", step);
    let mut mlp_modules = Contest::new(step_nn::mlp_nn()?, tch_modules(step_nn::mlp_tch()?), &[], MLP_MODULES_STEPS)?;
    let mut gpt_modules = Contest::new(step_nn::gpt_nn()?, tch_modules(step_nn::gpt_tch()?), &[], GPT_STEPS)?;
    for _ in 0..options.pairs.unwrap_or(PAIRS) {
        mlp_modules.round(None)?;
        gpt_modules.round(None)?;
        mlp.round(peer.as_mut())?;
        adamw.round(peer.as_mut())?;
    }

    let share = |bound| (Ratio::ShareOfCost, Some(Target::AtMost(bound)));
    let mut rows = vec![mlp.row(MLP, "tch", "plain tch, its own SGD", share(1.02))?];
    rows.push(adamw.row(
        ADAMW,
        "tch",
        "plain tch, its own AdamW",
        (Ratio::TimesFasterByTime, Some(Target::AtLeast(2.5))),
    )?);
    for (contest, case) in [(&mlp_modules, MLP_MODULES), (&gpt_modules, GPT_MODULES)] {
        rows.push(contest.row(case, "tch's modules", "tch's own modules, our SGD", share(1.01))?);
    }
    if peer.is_some() {
        rows.insert(0, mlp.row(MLP, "mlp_default", "PyTorch, default", share(0.8))?);
        rows.insert(1, mlp.row(MLP, "mlp_fused", "PyTorch, fused", share(0.8))?);
        rows.push(adamw.row(ADAMW, "adamw_fused", "PyTorch, fused", share(1.1))?);
        rows.push(adamw.row(ADAMW, "adamw_foreach", "PyTorch, foreach", (Ratio::ShareOfCost, None))?);
    }
    Ok(Findings { rows, missing }.report(Machine::detect(None), versions))
}

/// Samples of ours, of plain tch (`local`) and of the Python peer (`remote`), one of each per round.
struct Contest {
    steps: u32,
    ours: (Step, Vec<f64>),
    local: (&'static str, Step, Vec<f64>),
    remote: Vec<(&'static str, Vec<f64>)>,
}

impl Contest {
    fn new(mut ours: Step, mut local: (&'static str, Step), remote: &[&'static str], steps: u32) -> Result<Self> {
        // The first steps create the optimizers' state.
        for _ in 0..3 {
            ours()?;
            local.1()?;
        }
        let remote = remote.iter().map(|&name| (name, Vec::new())).collect();
        Ok(Self { steps, ours: (ours, Vec::new()), local: (local.0, local.1, Vec::new()), remote })
    }

    fn round(&mut self, peer: Option<&mut Peer>) -> Result<()> {
        let ours_first = self.ours.1.len().is_multiple_of(2);
        for is_ours in [ours_first, !ours_first] {
            match is_ours {
                true => self.ours.1.push(time(&mut self.ours.0, self.steps)?),
                false => self.local.2.push(time(&mut self.local.1, self.steps)?),
            }
        }
        if let Some(peer) = peer {
            for (name, samples) in &mut self.remote {
                samples.push(peer.measure(name, self.steps)? / f64::from(self.steps));
            }
        }
        Ok(())
    }

    fn row(
        &self,
        case: &str,
        name: &str,
        peer_name: &str,
        (ratio, target): (Ratio, Option<Target>),
    ) -> Result<VersusRow> {
        let remote = self.remote.iter().find(|(remote, _)| *remote == name).map(|(_, samples)| samples);
        let theirs = remote.unwrap_or(&self.local.2);
        let in_us = |samples: &[f64]| samples.iter().map(|seconds| seconds * 1e6).collect::<Vec<_>>();
        Ok(VersusRow::of_pairs(case, peer_name, "us", (&in_us(&self.ours.1), &in_us(theirs)), ratio, target)?)
    }
}

/// Seconds per step, after steps that are not timed: the first ones find the caches full of another contest's data.
fn time(step: &mut Step, steps: u32) -> Result<f64> {
    for _ in 0..=steps / 10 {
        step()?;
    }
    let started = Instant::now();
    for _ in 0..steps {
        step()?;
    }
    Ok(started.elapsed().as_secs_f64() / f64::from(steps))
}

fn mlp_batch() -> (Tensor, Tensor) {
    let inputs = Tensor::randn([16, 784], (Kind::Float, Device::Cpu));
    (inputs, Tensor::randint(10, [16], (Kind::Int64, Device::Cpu)))
}

/// A step as a user of Overdrive writes it, with a disabled `GradScaler` and windows of one batch.
fn mlp_ours() -> Result<Step> {
    let vs = VarStore::new(Device::Cpu);
    let model = Mlp::new(&vs.root(), &WIDTHS);
    let mut opt = Sgd::builder(vs.trainable_variables()).lr(0.01).build()?;
    let mut scaler = GradScaler::builder(Device::Cpu).enabled(false).build()?;
    let mut accum = Accumulator::new(1)?;
    let (inputs, targets) = mlp_batch();
    Ok(Box::new(move || {
        opt.zero_grad()?;
        let loss = cross_entropy(&model.forward(&inputs), &targets);
        accum.backward(&opt, &scaler.scale(&loss)?, Samples(16), true)?;
        scaler.step(&mut opt)?;
        scaler.update()?;
        Ok(())
    }))
}

fn mlp_tch() -> Result<Step> {
    let vs = VarStore::new(Device::Cpu);
    let model = Mlp::new(&vs.root(), &WIDTHS);
    let mut opt = nn::Sgd::default().build(&vs, 0.01)?;
    let (inputs, targets) = mlp_batch();
    Ok(Box::new(move || {
        opt.backward_step(&cross_entropy(&model.forward(&inputs), &targets));
        Ok(())
    }))
}

/// Adds parameters of the given shapes to `vs`, with random gradients.
fn params(vs: &VarStore, shapes: &[Vec<i64>]) {
    for (index, shape) in shapes.iter().enumerate() {
        let param = vs.root().randn(&format!("p{index}"), shape, 0.0, 1.0);
        (&param * param.randn_like().detach()).sum(Kind::Float).backward();
    }
}

fn adamw_ours(shapes: &[Vec<i64>]) -> Result<Step> {
    let vs = VarStore::new(Device::Cpu);
    params(&vs, shapes);
    let mut opt = AdamW::builder(vs.trainable_variables()).lr(1e-3).build()?;
    Ok(Box::new(move || Ok(opt.step()?)))
}

fn adamw_tch(shapes: &[Vec<i64>]) -> Result<Step> {
    let vs = VarStore::new(Device::Cpu);
    params(&vs, shapes);
    let mut opt = nn::AdamW::default().build(&vs, 1e-3)?;
    Ok(Box::new(move || {
        opt.step();
        Ok(())
    }))
}
