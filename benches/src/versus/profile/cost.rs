//! The profiler's overhead per step, and the time to write its trace.

use std::cell::{Cell, RefCell};
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use overdrive::prelude::*;
use overdrive_bench_report::{Ratio, Target};
use overdrive_profile::{Activity, Profile, Profiler};
use tch::nn::VarStore;

use super::{Step, time};
use crate::model::{Cnn, Mlp, cross_entropy};
use crate::versus::turns::{Case, Findings, Program, Turns};

const PAIRS: u32 = 15;
const MODELS: [Model; 2] = [
    Model { key: "mlp", name: "MLP 784-128-128-10, batch 64", steps: 60, operators: ["aten::addmm", "aten::mm"] },
    Model {
        key: "cnn",
        name: "MNIST CNN, batch 2",
        steps: 40,
        operators: ["aten::mkldnn_convolution", "aten::convolution_backward"],
    },
];
/// A sample of the overhead is the median of this many differences.
const ROUNDS: usize = 5;
/// Steps that are timed while a trace is written.
const FOLLOWING: u32 = 20;
const OPTIONS: &str = "shapes, memory and FLOPs recorded, AdamW, one thread";

struct Model {
    key: &'static str,
    name: &'static str,
    /// Steps per sample.
    steps: u32,
    /// The operators with most of its arithmetic, one in forward and one in backward.
    operators: [&'static str; 2],
}

/// A forward pass, from inputs to logits.
type Forward = Box<dyn Fn(&Tensor) -> Tensor>;

pub fn compare(pairs: Option<u32>, program: &Program, folder: &Path, findings: &mut Findings) -> Result<()> {
    let trace = folder.join("ours.json");
    for Model { key: model, name, steps, operators } in MODELS {
        let step = RefCell::new(training(model)?);
        // More results of the last sample, which the ways "relative" and "operators" return.
        let (relative, of_operators) = (Cell::new(0.0), Cell::new(0.0));
        let mut turns = Turns::default();
        turns.ours("added", || {
            let (mut added, mut times) = (Vec::new(), Vec::new());
            for _ in 0..ROUNDS {
                let alone = time(&step, steps)?;
                let under = record(&step, steps)?.0;
                added.push((under - alone) * 1e6);
                times.push(under / alone);
            }
            relative.set(median(times));
            Ok(median(added))
        });
        turns.peer("torch.profiler", program, |peer| Ok(peer.measure(&format!("{model}_added"), steps)? * 1e6));
        turns.ours("relative", || Ok(relative.get()));
        turns.peer("torch.profiler ", program, |peer| peer.measure(&format!("{model}_relative"), steps));
        turns.ours("export", || {
            let (_, profile) = record(&step, steps)?;
            let started = Instant::now();
            profile.export_chrome_trace(&trace)?;
            let took = started.elapsed();
            of_operators.set(self_cpu_us(&profile, &operators)? / f64::from(steps + 1));
            Ok(took.as_secs_f64() * 1e3)
        });
        turns.peer("torch.profiler  ", program, |peer| Ok(peer.measure(&format!("{model}_export"), steps)? * 1e3));
        turns.ours("operators", || Ok(of_operators.get()));
        turns.peer("torch.profiler   ", program, |peer| Ok(peer.measure(&format!("{model}_operators"), steps)? * 1e6));
        turns.ours("while a trace is written", || {
            let (_, profile) = record(&step, steps)?;
            let started = Instant::now();
            let writer = profile.export_chrome_trace_in_background(&trace)?;
            time(&step, FOLLOWING)?;
            let took = started.elapsed();
            writer.wait()?;
            Ok(took.as_secs_f64() * 1e3)
        });
        turns.ours("the same steps, nothing written", || {
            let _profile = record(&step, steps)?;
            Ok(time(&step, FOLLOWING)? * f64::from(FOLLOWING) * 1e3)
        });
        turns.take(&format!("profile, {model}"), pairs.unwrap_or(PAIRS))?;

        let mut row = |what: &str, unit, pair, target| {
            let text = format!("{what}, {name}, {OPTIONS}");
            turns.compare(findings, Case { text: &text, unit, ratio: Ratio::ShareOfCost }, pair, target)
        };
        row(
            "what the profiler adds to a training step",
            "us",
            ("added", "torch.profiler"),
            Some(Target::AtMost(1.05)),
        )?;
        row("a training step under the profiler over one without", "times", ("relative", "torch.profiler "), None)?;
        let written = format!("writing the Chrome trace of {steps} steps");
        row(&written, "ms", ("export", "torch.profiler  "), Some(Target::AtMost(1.0)))?;
        let [forward, backward] = operators;
        let pair = ("operators", "torch.profiler   ");
        let times = format!("self CPU time that `key_averages` says of `{forward}` and `{backward}` in a step");
        row(&times, "us", pair, Some(Target::Within(0.1)))?;
        let pair = ("while a trace is written", "the same steps, nothing written");
        let stalled =
            format!("{FOLLOWING} steps, with the call before them that has a trace written in the background");
        row(&stalled, "ms", pair, Some(Target::AtMost(1.05)))?;
    }
    Ok(())
}

/// The self CPU time of some operators, in microseconds.
fn self_cpu_us(profile: &Profile, operators: &[&str]) -> Result<f64> {
    let averages = profile.key_averages(false)?;
    let of = |name: &&str| averages.get(name).map(|sum| sum.self_cpu_time_total_ns as f64 / 1e3);
    operators.iter().map(|name| of(name).with_context(|| format!("the profile has no {name}"))).sum()
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Seconds per step under the profiler, which records shapes, memory and FLOPs, and the profile.
fn record(step: &RefCell<Step>, steps: u32) -> Result<(f64, Arc<Profile>)> {
    let mut profiler = Profiler::builder()
        .activities(&[Activity::Cpu])
        .record_shapes(true)
        .profile_memory(true)
        .with_flops(true)
        .start()?;
    // The first step under a profiler allocates its buffers.
    time(step, 1)?;
    let seconds = time(step, steps)?;
    profiler.stop()?;
    let profile = profiler.profile().cloned().context("nothing was recorded")?;
    Ok((seconds, profile))
}

/// A training step of a model, the same as the peer's.
fn training(model: &str) -> Result<Step> {
    let vs = VarStore::new(Device::Cpu);
    let (forward, inputs): (Forward, Vec<i64>) = match model {
        "mlp" => {
            let mlp = Mlp::new(&vs.root(), &[784, 128, 128, 10]);
            (Box::new(move |inputs| mlp.forward(inputs)), vec![64, 784])
        }
        _ => {
            let cnn = Cnn::new(&vs.root());
            (Box::new(move |images| cnn.forward(images)), vec![2, 1, 28, 28])
        }
    };
    let targets = Tensor::randint(10, [inputs[0]], (Kind::Int64, Device::Cpu));
    let inputs = Tensor::randn(inputs, (Kind::Float, Device::Cpu));
    let mut opt = AdamW::builder(vs.trainable_variables()).lr(1e-3).fused(true).build()?;
    Ok(Box::new(move || {
        opt.zero_grad()?;
        cross_entropy(&forward(&inputs), &targets).f_backward()?;
        Ok(opt.step()?)
    }))
}
