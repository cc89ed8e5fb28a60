//! Finding out what a run waits for: a step timer that records, and the diagnosis of the record.
//!
//! The loop has a planted bottleneck: it writes a log at each step, and waits until that is on disk. The record has the
//! share of each phase, the gaps in which no operator ran, and the program's scope of each gap.
//!
//! Expect: most of the time in the phase "other", in the scope "write log"; a diagnosis; `profile.html` in the folder,
//! if one is given. `overdrive-profile run` does the same without changes to the program, if it is built with the
//! feature `record`:
//!
//!     cargo build -p overdrive-examples --example 15_diagnosis
//!     cargo run -p overdrive-profile -- run -- target/debug/examples/15_diagnosis
#![forbid(unsafe_code)]

use std::fs::File;
use std::io::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use overdrive::prelude::*;
use overdrive::profile::{Diagnosis, RunRecorder};

const CPU: Device = Device::Cpu;

fn main() -> Result<()> {
    tch::manual_seed(1);
    let model = sequential![nn::Linear::new(64, 256)?, nn::Relu, nn::Linear::new(256, 10)?];
    let mut opt = AdamW::builder(&model).lr(1e-3).build()?;
    let inputs = Tensor::randn([3840, 64], (Kind::Float, CPU));
    let targets = Tensor::randint(10, [3840], (Kind::Int64, CPU));
    let loader = TensorDataset::new((inputs, targets))?.loader().batch_size(64).num_workers(1).build()?;

    let timer = StepTimer::builder().device(CPU).warmup_steps(5).record(RunRecorder::new()).build()?;
    let mut log = tempfile::tempfile()?;
    for batch in timer.batches(&loader) {
        let (inputs, targets) = batch?;
        let loss = {
            let _phase = timer.phase(Phase::Forward);
            model.forward(&inputs)?.cross_entropy_for_logits(&targets)
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
        write_log(&mut log, loss.double_value(&[]))?;
        timer.step(inputs.size()[0].unsigned_abs());
    }

    let run = timer.finish()?;
    let steps = run.steps.as_ref().context("no steps were timed")?;
    println!("{steps}\n");
    let diagnosis = Diagnosis::of(&run);
    println!("{diagnosis}");
    if let Some(folder) = std::env::args_os().nth(1).map(PathBuf::from) {
        run.write_html(&diagnosis, folder.join("profile.html"))?;
    }
    let profiled = run.profiled.as_ref().context("no steps were profiled")?;
    let of_log = profiled.gaps.iter().find(|gap| gap.scope.as_deref() == Some("write log"));
    let of_log = of_log.context("the log is not among the gaps")?;
    ensure!(of_log.phase == Phase::Other && of_log.seconds >= 0.009, "{of_log:?}");
    Ok(())
}

/// The planted bottleneck.
fn write_log(log: &mut File, loss: f64) -> Result<()> {
    let _scope = record_function("write log");
    writeln!(log, "loss {loss}")?;
    log.sync_all()?;
    // As on a busy network disk.
    std::thread::sleep(Duration::from_millis(10));
    Ok(())
}
