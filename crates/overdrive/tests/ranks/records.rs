//! Step timers on ranks under DDP: the diagnosis of their merged records.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use overdrive::prelude::*;
use overdrive_ddp::DistributedDataParallel;
use overdrive_profile::{Bottleneck, Diagnosis, Phase, RunProfile, RunRecorder, StepTimer};

use crate::harness::{Meeting, all_through, free_port, start};
use crate::{folder, moments};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);
/// The fault that is simulated.
const FAULT: &str = "OVERDRIVE_TEST_FAULT";

pub fn stragglers_are_named() -> Result<()> {
    let run = records("straggler")?;
    ensure!(run.ranks.len() == 2, "{} reports", run.ranks.len());
    let diagnosis = Diagnosis::of(&run);
    let first = diagnosis.findings.first().with_context(|| diagnosis.to_string())?;
    ensure!(first.bottleneck == Bottleneck::Straggler && first.evidence[0].contains("rank 1"), "{diagnosis}");
    Ok(())
}

pub fn large_exchanges_are_named() -> Result<()> {
    let run = records("exchange")?;
    let backward = run.profiled.as_ref().and_then(|it| it.phase(Phase::Backward)).context("nothing was profiled")?;
    ensure!(backward.communication_seconds > 0.0, "{backward:?}");
    let diagnosis = Diagnosis::of(&run);
    let first = diagnosis.findings.first().with_context(|| diagnosis.to_string())?;
    ensure!(first.bottleneck == Bottleneck::Communication, "{diagnosis}");
    Ok(())
}

/// The merged records of both ranks.
fn records(fault: &str) -> Result<RunProfile> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().to_str().context("a folder of ASCII letters")?;
    let (port, started, vars) = (free_port(), Instant::now(), [(moments::FOLDER, path), (FAULT, fault)]);
    let ranks = (0..2).map(|rank| start("records", rank, 2, port, &vars)).collect::<Result<Vec<_>>>()?;
    all_through(ranks, started)?;
    let read = |rank: usize| RunProfile::read_json(folder.path().join(format!("profile.rank{rank}.json")));
    Ok(RunProfile::merge_ranks(vec![read(1)?, read(0)?])?)
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let fault = std::env::var(FAULT)?;
    // As under a launcher: with more threads than CPUs, ranks would wait for CPUs and not for each other.
    tch::set_num_threads(1);
    let group = meeting.group()?;
    let vs = nn::VarStore::new(Device::Cpu);
    // Many parameters and little computation, or the reverse.
    let (width, batch) = if fault == "exchange" { (1536, 1) } else { (192, 256) };
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
