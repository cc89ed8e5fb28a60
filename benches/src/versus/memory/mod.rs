//! `versus memory`: activation checkpointing of a transformer of 24 layers and its saved tensors in files, their time and
//! their memory, beside a plain run and PyTorch's; the cost of hooks and of a batch that does not fit.

mod back_off;
pub mod disk;
mod hooks;

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::Result;
use overdrive::ffi::host_memory;
use overdrive::memory::{Budget, Policy};
use overdrive::nn::Forward;
use overdrive::prelude::*;
use overdrive_bench_report::{Machine, Ratio, Target, VersusReport};
use serde_json::json;

use super::Options;
use super::turns::{Case, Findings, Program, Turns};
use crate::gpt::{Gpt, VOCABULARY};

const PAIRS: u32 = 9;
const BLOCKS: usize = 24;
const WIDTH: i64 = 256;
const LENGTH: i64 = 128;
const BATCH: i64 = 8;

/// A way to run the blocks.
struct Way {
    name: &'static str,
    text: &'static str,
    checkpoint: Option<Checkpoint>,
}

/// How blocks are checkpointed, and what that may take in memory and time, as shares of the plain run.
struct Checkpoint {
    policy: Policy,
    memory: f64,
    time: f64,
}

impl Way {
    fn policy(&self) -> Option<&Policy> {
        self.checkpoint.as_ref().map(|checkpoint| &checkpoint.policy)
    }
}

struct Model {
    gpt: Gpt,
    tokens: Tensor,
    targets: Tensor,
}

impl Model {
    fn new() -> Result<Self> {
        let tokens = |size: &[i64]| Tensor::randint(VOCABULARY, size, (Kind::Int64, Device::Cpu));
        let (tokens, targets) = (tokens(&[BATCH, LENGTH]), tokens(&[BATCH * LENGTH]));
        Ok(Self { gpt: Gpt::sized(BLOCKS, WIDTH, LENGTH)?, tokens, targets })
    }

    fn pass(&mut self, policy: Option<&Policy>) -> Result<()> {
        self.gpt.checkpoint = policy.cloned();
        // Not in one statement, which would keep the logits until the pass is over.
        let loss = self.loss()?;
        Ok(loss.f_backward()?)
    }

    /// Without checkpoints.
    fn plain(&mut self) -> &Self {
        self.gpt.checkpoint = None;
        self
    }

    fn loss(&self) -> Result<Tensor> {
        self.loss_of(&self.tokens, &self.targets)
    }

    fn loss_of(&self, tokens: &Tensor, targets: &Tensor) -> Result<Tensor> {
        Ok(self.gpt.forward(tokens)?.cross_entropy_for_logits(targets))
    }
}

/// Seconds, or the most bytes at once besides what was there before. The gradients are there.
fn cost(what: &str, pass: impl FnOnce() -> Result<()>) -> Result<f64> {
    let (before, begun) = (host_memory::stats()?.allocated, Instant::now());
    host_memory::reset_peak()?;
    pass()?;
    let seconds = begun.elapsed().as_secs_f64();
    Ok(if what == "bytes" { (host_memory::stats()?.peak - before) as f64 } else { seconds })
}

/// One thread, and tensors are counted.
fn prepare() -> Result<()> {
    overdrive::tch::set_num_threads(1);
    Ok(host_memory::count(usize::MAX)?)
}

pub fn measure(options: &Options) -> Result<VersusReport> {
    prepare()?;
    let model = std::cell::RefCell::new(Model::new()?);
    let sizes = json!({"blocks": BLOCKS, "width": WIDTH, "length": LENGTH, "batch": BATCH, "vocabulary": VOCABULARY});
    let source = include_str!("../../../peers/memory.py");
    let program = Program::start(&options.python, source, &sizes, "a Python with torch 2.11.0 is needed");
    let ways = [
        Way { name: "plain", text: "plain", checkpoint: None },
        Way {
            name: "checkpoint",
            text: "each block checkpointed",
            checkpoint: Some(Checkpoint { policy: Policy::Nothing, memory: 0.25, time: 1.33 }),
        },
        Way {
            name: "selective",
            text: "each block checkpointed, products kept",
            checkpoint: Some(Checkpoint { policy: Policy::Products, memory: 0.55, time: 1.2 }),
        },
    ];
    let budget = &Policy::Budget(Budget::new(0.5)?);
    let pairs = options.pairs.unwrap_or(PAIRS);
    let mut findings = Findings::default();
    hooks::cost(&mut findings, &program, pairs)?;
    for (what, unit) in [("bytes", "B"), ("time", "s")] {
        let (mut turns, model) = (Turns::default(), &model);
        for way in &ways {
            turns.ours(way.name, move || cost(what, || model.borrow_mut().pass(way.policy())));
            let request = format!("{}-{what}", way.name);
            turns.peer(&peer(way.name), &program, move |peer| peer.measure(&request, 1));
        }
        turns.ours("budget", move || cost(what, || model.borrow_mut().pass(Some(budget))));
        turns.take(what, pairs)?;
        let text = format!("{} of forward and backward, each block checkpointed with a budget of 0.5", full_name(what));
        let case = Case { text: &text, unit, ratio: Ratio::ShareOfCost };
        // What was asked for is the memory: within a tenth of it.
        for target in
            if what == "bytes" { &[Some(Target::AtLeast(0.45)), Some(Target::AtMost(0.55))][..] } else { &[None] }
        {
            turns.compare(&mut findings, case, ("budget", "plain"), *target)?;
        }
        for way in &ways {
            let text =
                format!("{} of forward and backward, transformer of {BLOCKS} layers, {}", full_name(what), way.text);
            let case = Case { text: &text, unit, ratio: Ratio::ShareOfCost };
            if let Some(goals) = &way.checkpoint {
                let most = if unit == "B" { goals.memory } else { goals.time };
                turns.compare(&mut findings, case, (way.name, "plain"), Some(Target::AtMost(most)))?;
            }
            let target = way.checkpoint.is_some().then_some(Target::AtMost(1.0));
            turns.compare(&mut findings, case, (way.name, &peer(way.name)), target)?;
        }
    }
    disk::compare(&mut findings, pairs)?;
    back_off::cost(&mut findings, model.borrow_mut().plain(), pairs)?;
    let mut versions = BTreeMap::from([("overdrive".to_owned(), env!("CARGO_PKG_VERSION").to_owned())]);
    versions.insert("libtorch".to_owned(), "2.11.0".to_owned());
    versions.extend(program.version().map(|version| ("torch (Python)".to_owned(), version)));
    Ok(findings.report(Machine::detect(None), versions))
}

fn full_name(what: &str) -> &str {
    if what == "bytes" { "peak memory of tensors" } else { "time" }
}

fn peer(way: &str) -> String {
    match way {
        "plain" => "PyTorch".to_owned(),
        "checkpoint" => "PyTorch, checkpoint".to_owned(),
        _ => "PyTorch, selective checkpoint".to_owned(),
    }
}
