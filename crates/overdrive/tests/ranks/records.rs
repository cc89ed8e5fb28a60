//! Step timers on ranks under DDP: the diagnosis of their merged records. The calls are those that libtorch made, but
//! their times are [fixed](with_fixed_times), so that a busy machine has no effect.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use overdrive::prelude::*;
use overdrive_ddp::DistributedDataParallel;
use overdrive_profile::{Bottleneck, Diagnosis, OpTimes, Phase, RunProfile, RunRecorder, StepTimer};
use tch::nn::{self, Module};

use crate::harness::{Meeting, all_through, free_port, start};
use crate::{folder, moments};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);
/// The fault that is simulated.
const FAULT: &str = "OVERDRIVE_TEST_FAULT";

pub fn stragglers_are_named() -> Result<()> {
    let run = merged("straggler", records("straggler")?)?;
    ensure!(run.ranks.len() == 2, "{} reports", run.ranks.len());
    let diagnosis = Diagnosis::of(&run);
    let first = diagnosis.findings.first().with_context(|| diagnosis.to_string())?;
    ensure!(first.bottleneck == Bottleneck::Straggler && first.evidence[0].contains("rank 1"), "{diagnosis}");
    Ok(())
}

pub fn large_exchanges_are_named() -> Result<()> {
    let runs = records("exchange")?;
    let backward =
        runs[0].profiled.as_ref().and_then(|it| it.phase(Phase::Backward)).context("nothing was profiled")?;
    // An exchange may also end before the operator that has begun it.
    ensure!(backward.communication_seconds + backward.exchange_operator_seconds > 0.0, "{backward:?}");
    let run = merged("exchange", runs)?;
    let diagnosis = Diagnosis::of(&run);
    let first = diagnosis.findings.first().with_context(|| diagnosis.to_string())?;
    ensure!(first.bottleneck == Bottleneck::Communication, "{diagnosis}");
    Ok(())
}

/// The records of both ranks.
fn records(fault: &str) -> Result<[RunProfile; 2]> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().to_str().context("a folder of ASCII letters")?;
    let (port, started, vars) = (free_port(), Instant::now(), [(moments::FOLDER, path), (FAULT, fault)]);
    let ranks = (0..2).map(|rank| start("records", rank, 2, port, &vars)).collect::<Result<Vec<_>>>()?;
    all_through(ranks, started)?;
    let read = |rank: usize| RunProfile::read_json(folder.path().join(format!("profile.rank{rank}.json")));
    Ok([read(0)?, read(1)?])
}

fn merged(fault: &str, mut runs: [RunProfile; 2]) -> Result<RunProfile> {
    /// Seconds for which a byte of the gradients travels.
    const BYTE: f64 = 1e-9;
    let width = width(fault) as f64;
    // The gradients of two layers, in float32.
    let exchange = BYTE * 2.0 * (width * width + width) * 4.0;
    let slowest = runs.iter().map(seconds_of_ops).fold(0.0, f64::max);
    for run in &mut runs {
        // In the backward pass, the ranks also wait for the slowest.
        let waits = slowest - seconds_of_ops(run) + exchange;
        with_fixed_times(run, Phase::Backward, waits);
        let Some(profiled) = &mut run.profiled else { continue };
        for times in profiled.phases.iter_mut().filter(|times| times.phase == Phase::Backward) {
            times.communication_seconds = waits;
        }
        for times in &profiled.phases {
            for step in &mut run.step_times {
                step.host_seconds[times.phase as usize] = times.seconds;
            }
        }
        run.samples.clear();
    }
    let [first, second] = runs;
    Ok(RunProfile::merge_ranks(vec![second, first])?)
}

/// A call of an operator takes 2 us, plus 0.1 us per thousand floating point operations.
fn seconds(op: &OpTimes) -> f64 {
    2e-6 * op.calls + 1e-10 * op.flops
}

/// Of a step.
pub fn seconds_of_ops(run: &RunProfile) -> f64 {
    run.profiled.iter().flat_map(|it| &it.ops).map(seconds).sum()
}

/// Replaces the times of steps and operators: operators take [`seconds`], and a step also waits in one phase. Times of
/// single steps, and the samples of the machine, remain.
pub fn with_fixed_times(run: &mut RunProfile, waits_in: Phase, waits: f64) {
    let (Some(profiled), Some(steps)) = (&mut run.profiled, &mut run.steps) else { return };
    profiled.ops.iter_mut().for_each(|op| op.self_cpu_seconds = seconds(op));
    (profiled.gaps, profiled.read_backs, profiled.queued_seconds) = (Vec::new(), Vec::new(), None);
    for times in &mut profiled.phases {
        let ops = profiled.ops.iter().filter(|op| op.phase == times.phase);
        times.operator_seconds = ops.map(|op| op.self_cpu_seconds).sum();
        times.seconds = times.operator_seconds + if times.phase == waits_in { waits } else { 0.0 };
        (times.small_calls, times.small_call_seconds, times.short_pause_seconds) = (0.0, 0.0, 0.0);
        (times.communication_seconds, times.exchange_operator_seconds) = (0.0, 0.0);
    }
    profiled.step_seconds = profiled.phases.iter().map(|times| times.seconds).sum();
    steps.median_seconds = profiled.step_seconds;
    steps.total_seconds = profiled.step_seconds * steps.steps as f64;
    for report in &mut steps.phases {
        report.median_seconds = profiled.phase(report.phase).map_or(0.0, |times| times.seconds);
        report.share = report.median_seconds / profiled.step_seconds;
    }
}

/// Many parameters and little computation, or the reverse.
fn width(fault: &str) -> i64 {
    if fault == "exchange" { 1536 } else { 192 }
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let fault = std::env::var(FAULT)?;
    // As under a launcher: with more threads than CPUs, ranks would wait for CPUs and not for each other.
    tch::set_num_threads(1);
    let group = meeting.group()?;
    let vs = nn::VarStore::new(Device::Cpu);
    let (width, batch) = (width(&fault), if fault == "exchange" { 1 } else { 256 });
    let model = nn::seq()
        .add(nn::linear(vs.root() / "in", width, width, Default::default()))
        .add_fn(Tensor::relu)
        .add(nn::linear(vs.root() / "out", width, width, Default::default()));
    let mut opt = AdamW::builder(vs.trainable_variables()).fused(true).build()?;
    let ddp = DistributedDataParallel::new(&vs, &group)?;
    let recorder = RunRecorder::new().steps_before(8).profiled_steps(4).folder(folder()?);
    let recorder = recorder.sample_interval(Duration::from_millis(20));
    let timer = StepTimer::builder().warmup_steps(4).record(recorder).build()?;
    for _ in 0..40 {
        let inputs = Tensor::randn([batch, width], FLOAT);
        let loss = {
            let _phase = timer.phase(Phase::Forward);
            let outputs = ddp.forward(|| model.forward(&inputs))?;
            if fault == "straggler" && meeting.rank == 1 {
                // Extra work on rank 1.
                let _ = tch::no_grad(|| (0..12).map(|_| model.forward(&inputs)).collect::<Vec<_>>());
            }
            outputs.square().mean(Kind::Float)
        };
        {
            let _phase = timer.phase(Phase::Backward);
            loss.backward();
        }
        {
            let _phase = timer.phase(Phase::Optimizer);
            opt.step()?;
            opt.zero_grad()?;
        }
        timer.step(batch as u64);
    }
    let run = timer.finish()?;
    ensure!(run.world_size == 2 && run.rank == meeting.rank as u64, "rank {} of {}", run.rank, run.world_size);
    Ok(())
}
