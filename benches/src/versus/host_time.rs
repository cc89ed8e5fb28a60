//! `versus host-time`: the host's time for a training step, where kernels take no time. It is what bounds a step of small
//! kernels on a GPU. Both sides run on the same stand-in for CUDA's runtime, whose own time is in both. Without cuDNN, whose
//! own time on the host the stand-in does not have.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

use anyhow::{Context, Result};
use nix::sys::resource::{UsageWho, getrusage};
use overdrive::tch::Device;
use overdrive_bench_report::{Machine, Ratio, Target, VersusReport};
use overdrive_fakecuda::Fake;

use super::Options;
use super::peer::Peer;
use super::turns::{Case, Findings, Program, Turns};
use crate::gpu_steps::{Recipe, ours};

const PAIRS: u32 = 9;
const PYTORCH: &str = "PyTorch, fused AdamW";
/// The calling thread's time, and with it that of the thread that libtorch runs the backward pass in, on both sides.
const CLOCKS: [(&str, UsageWho, &str); 2] = [
    ("thread", UsageWho::RUSAGE_THREAD, "calling thread's time"),
    ("process", UsageWho::RUSAGE_SELF, "all threads' time"),
];
/// Samples take some tenths of a second: the clock counts in milliseconds.
const STEPS: [(&str, u32); 3] = [("mlp", 400), ("cnn", 300), ("gpt", 100)];

pub fn measure(options: &Options) -> Result<VersusReport> {
    overdrive_fakecuda::start_fake(1)?;
    Fake::get().context("there are no stand-ins, so there is no step to time")?;
    overdrive::tch::set_num_threads(1);
    overdrive::tch::Cuda::set_user_enabled_cudnn(false);
    let recipes = STEPS.map(|(model, _)| Recipe::new(model, "AdamW"));
    let mut environment = overdrive_fakecuda::environment(1);
    environment.push(("OMP_NUM_THREADS", "1".to_owned()));
    let args = [serde_json::to_string(&recipes)?];
    let peer = Peer::start_with(&options.python, include_str!("../../peers/gpu_counts.py"), &args, &environment);
    let program = Program::together(peer, "a Python with torch 2.11.0 is needed");

    let mut versions = BTreeMap::from([("overdrive".to_owned(), env!("CARGO_PKG_VERSION").to_owned())]);
    versions.extend(program.version().map(|version| ("torch (Python)".to_owned(), version)));
    let mut findings = Findings::default();
    for (index, (recipe, (model, steps))) in recipes.iter().zip(STEPS).enumerate() {
        let step = RefCell::new(ours::step(recipe, Device::Cuda(0))?);
        let mut turns = Turns::default();
        for (clock, who, _) in CLOCKS {
            let step = &step;
            turns.ours(clock, move || {
                let started = processor_time(who)?;
                for _ in 0..steps {
                    drop((step.borrow_mut().train)()?);
                }
                Ok((processor_time(who)? - started).as_secs_f64() * 1e6 / f64::from(steps))
            });
            let request = format!("{clock}-{index}");
            let theirs = move |peer: &mut Peer| Ok(peer.measure(&request, steps)? * 1e6 / f64::from(steps));
            turns.peer(&format!("{PYTORCH}{}", padding(clock)), &program, theirs);
        }
        turns.take(model, options.pairs.unwrap_or(PAIRS))?;
        for (clock, _, what) in CLOCKS {
            let text = format!("{what} of a step, {}, kernels of no time", recipe.name());
            let case = Case { text: &text, unit: "us", ratio: Ratio::ShareOfCost };
            let peer = format!("{PYTORCH}{}", padding(clock));
            turns.compare(&mut findings, case, (clock, &peer), Some(Target::AtMost(0.6)))?;
        }
    }
    Ok(findings.report(Machine::detect(Some("a fake device, whose kernels take no time".to_owned())), versions))
}

/// Tells the ways of one peer apart; rows leave it out.
fn padding(clock: &str) -> String {
    " ".repeat(clock.len())
}

fn processor_time(who: UsageWho) -> Result<Duration> {
    let usage = getrusage(who)?;
    let times = [usage.user_time(), usage.system_time()];
    Ok(times.iter().map(|time| Duration::new(time.tv_sec() as u64, time.tv_usec() as u32 * 1000)).sum())
}
