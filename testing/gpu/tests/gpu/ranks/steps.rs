//! How often the host waits for the device in each of many data-parallel steps, beside PyTorch. The rank is alone: so
//! its device is done at once, and nothing depends on when another rank comes.

use std::process::Command;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use overdrive::prelude::*;
use overdrive_ddp::Backend;
use overdrive_fakecuda::{Counts, waits};

use super::processes::{Ended, Meeting, Running, all_succeed, run};
use super::{group, python};
use crate::{FLOAT, GPU, fake};

/// libtorch reads its timers in the first ten steps, and in each hundredth.
const STEPS: usize = 120;
/// The second step begins with new buckets, which the ranks agree on.
const REBUILDS: usize = 1;

/// With the word "times", those of libtorch's log are asked for; with "where", it is told where the host waits.
pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = group(meeting, Backend::Nccl)?;
    let model = sequential![nn::Linear::new(32, 64)?, nn::Relu, nn::Linear::new(64, 8)?];
    model.to(GPU)?;
    let ddp = DistributedDataParallel::builder(&group).bucket_cap_mb(0.005).build(&model)?;
    if meeting.arguments == ["times"] {
        ddp.set_logging_sample_rate(100)?;
    }
    let mut opt = Sgd::builder(&model).lr(0.01).build()?;
    let inputs = Tensor::ones([4, 32], FLOAT);
    fake()?.trace_waits(meeting.arguments == ["where"]);
    for step in 0..STEPS {
        fake()?.reset();
        let loss = ddp.forward(|| model.forward(&inputs))??.square().mean(Kind::Float);
        ddp.backward(&loss)?;
        opt.step()?;
        opt.zero_grad()?;
        let counts = fake()?.counts();
        let counts = counts.iter().filter(|(name, _)| !name.starts_with("kernel "));
        fake()?.waits().lines().for_each(|line| println!("wait{step} {line}"));
        println!("step {}", counts.map(|(name, count)| format!("{name}: {count}")).collect::<Vec<_>>().join(";"));
    }
    let has_times = ddp.logging_data()?.iter().any(|(name, _)| name == "avg_forward_compute_time");
    println!("times {has_times}");
    Ok(())
}

/// The waits of each step.
fn steps(ended: &[Ended]) -> Result<Vec<u64>> {
    let counts = |line: &str| -> Result<Counts> {
        let count = |text: &str| {
            let (name, count) = text.rsplit_once(": ").with_context(|| format!("no count: {text}"))?;
            Ok((name.to_owned(), count.parse()?))
        };
        line.split(';').map(count).collect()
    };
    let lines = ended.first().context("no rank")?.lines("step");
    ensure!(lines.len() == STEPS, "{} steps were told", lines.len());
    lines.into_iter().map(|line| Ok(waits(&counts(line)?))).collect()
}

/// Whether libtorch's log has times.
fn has_times(ended: &[Ended]) -> Option<&str> {
    ended.first()?.lines("times").first().copied()
}

/// The waits of each of PyTorch's steps, which are the same each time: so they are counted once for all tests.
fn pytorchs() -> Result<Vec<u64>> {
    static KNOWN: Mutex<Option<Vec<u64>>> = Mutex::new(None);
    let mut known = KNOWN.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(waits) = &*known {
        return Ok(waits.clone());
    }
    let (folder, since) = (tempfile::tempdir()?, Instant::now());
    let mut command = Command::new(python().context("no Python with torch")?);
    command.arg(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/gpu/ranks/steps.py"));
    command.arg(folder.path().join("meet")).arg(STEPS.to_string());
    let waits = steps(&all_succeed(vec![Running::start(command, 1)?], since)?)?;
    Ok(known.insert(waits).clone())
}

/// Only where the buckets are made anew does a step wait, as often as PyTorch's, which also reads its timers.
pub fn no_step_waits_to_read_a_timer() -> Result<()> {
    let ended = run("steps", 1, &[])?;
    let (own, pytorchs) = (steps(&ended)?, pytorchs()?);
    for (step, (own, pytorchs)) in own.iter().zip(&pytorchs).enumerate() {
        if own > pytorchs || (*own > 0 && step != REBUILDS) {
            let told = run("steps", 1, &["where"])?;
            let told = told.first().context("no rank")?.lines(&format!("wait{step}")).join("\n");
            bail!("step {}: {own} waits, PyTorch's {pytorchs}:\n{told}", step + 1);
        }
    }
    ensure!(has_times(&ended) == Some("false"), "times were measured");
    let sums = [&own, &pytorchs].map(|waits| waits.iter().sum::<u64>());
    println!("waits in {STEPS} steps: {} of ours, {} of PyTorch's", sums[0], sums[1]);
    Ok(())
}

/// As PyTorch's steps do, once they are asked for.
pub fn times_are_measured_where_they_are_asked_for() -> Result<()> {
    let waiting = |waits: Vec<u64>| (0..STEPS).filter(|step| waits[*step] > 0).collect::<Vec<_>>();
    let ended = run("steps", 1, &["times"])?;
    let (own, pytorchs) = (waiting(steps(&ended)?), waiting(pytorchs()?));
    ensure!(has_times(&ended) == Some("true"), "no times were measured");
    ensure!(own == pytorchs && own.len() > REBUILDS, "steps {own:?} wait, PyTorch's {pytorchs:?}");
    Ok(())
}
