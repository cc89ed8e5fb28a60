//! `versus memory`: activation checkpointing of a transformer of 24 layers, its time and its memory, beside a plain run and
//! PyTorch's.

use std::collections::BTreeMap;
use std::time::Instant;

use anyhow::Result;
use overdrive::ffi::host_memory;
use overdrive::memory::Policy;
use overdrive::nn::Forward;
use overdrive::prelude::*;
use overdrive_bench_report::versus::SCHEMA;
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
    fn pass(&mut self, policy: Option<&Policy>) -> Result<()> {
        self.gpt.checkpoint = policy.cloned();
        // Not in one statement, which would keep the logits until the pass is over.
        let loss = self.loss()?;
        Ok(loss.f_backward()?)
    }

    fn loss(&self) -> Result<Tensor> {
        Ok(self.gpt.forward(&self.tokens)?.cross_entropy_for_logits(&self.targets))
    }

    /// Seconds.
    fn time(&mut self, policy: Option<&Policy>) -> Result<f64> {
        let begun = Instant::now();
        self.pass(policy)?;
        Ok(begun.elapsed().as_secs_f64())
    }

    /// The most bytes at once, besides what was there before. The gradients are there.
    fn bytes(&mut self, policy: Option<&Policy>) -> Result<f64> {
        let before = host_memory::stats()?.allocated;
        host_memory::reset_peak()?;
        self.pass(policy)?;
        Ok((host_memory::stats()?.peak - before) as f64)
    }
}

pub fn measure(options: &Options) -> Result<VersusReport> {
    overdrive::tch::set_num_threads(1);
    host_memory::count(usize::MAX)?;
    let tokens = |size: &[i64]| Tensor::randint(VOCABULARY, size, (Kind::Int64, Device::Cpu));
    let gpt = Gpt::sized(BLOCKS, WIDTH, LENGTH)?;
    let model = Model { gpt, tokens: tokens(&[BATCH, LENGTH]), targets: tokens(&[BATCH * LENGTH]) };
    let model = std::cell::RefCell::new(model);
    let sizes = json!({"blocks": BLOCKS, "width": WIDTH, "length": LENGTH, "batch": BATCH, "vocabulary": VOCABULARY});
    let source = include_str!("../../peers/memory.py");
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
    let mut findings = Findings::default();
    for (what, unit) in [("bytes", "B"), ("time", "s")] {
        let mut turns = Turns::default();
        for way in &ways {
            let model = &model;
            turns.ours(way.name, move || {
                let mut model = model.borrow_mut();
                if what == "bytes" { model.bytes(way.policy()) } else { model.time(way.policy()) }
            });
            let request = format!("{}-{what}", way.name);
            turns.peer(&peer(way.name), &program, move |peer| peer.measure(&request, 1));
        }
        turns.take(what, options.pairs.unwrap_or(PAIRS))?;
        for way in &ways {
            let what = if what == "bytes" { "peak memory of tensors" } else { "time" };
            let text = format!("{what} of forward and backward, transformer of {BLOCKS} layers, {}", way.text);
            let case = Case { text: &text, unit, ratio: Ratio::ShareOfCost };
            if let Some(goals) = &way.checkpoint {
                let most = if unit == "B" { goals.memory } else { goals.time };
                turns.compare(&mut findings, case, (way.name, "plain"), Some(Target::AtMost(most)))?;
            }
            let target = way.checkpoint.is_some().then_some(Target::AtMost(1.0));
            turns.compare(&mut findings, case, (way.name, &peer(way.name)), target)?;
        }
    }
    let mut versions = BTreeMap::from([("overdrive".to_owned(), env!("CARGO_PKG_VERSION").to_owned())]);
    versions.insert("libtorch".to_owned(), "2.11.0".to_owned());
    versions.extend(program.version().map(|version| ("torch (Python)".to_owned(), version)));
    let Findings { rows, missing } = findings;
    Ok(VersusReport { schema: SCHEMA, machine: Machine::detect(None), versions, rows, missing, pairs_asked: None })
}

fn peer(way: &str) -> String {
    match way {
        "plain" => "PyTorch".to_owned(),
        "checkpoint" => "PyTorch, checkpoint".to_owned(),
        _ => "PyTorch, selective checkpoint".to_owned(),
    }
}
