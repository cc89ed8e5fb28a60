//! A run that is killed and resumed, and ends as if it had never been killed.
//!
//! Trains a small model with dropout for 60 steps in one go; then again in a process that is killed with SIGKILL a few
//! times and restarted each time.
//!
//! Expect: the step at which each process resumes, and final checkpoints with identical bytes.
//!
//!     cargo run -p overdrive-examples --example 10_checkpoints
#![forbid(unsafe_code)]

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};

use anyhow::{Context, Result, ensure};
use overdrive::prelude::*;

const STEPS: u64 = 60;
/// Each process is killed after this many lines of its output.
const KILLED_AFTER: [usize; 3] = [9, 21, 4];

#[derive(Module)]
struct Net {
    hidden: nn::Linear,
    dropout: nn::Dropout,
    out: nn::Linear,
}

impl Net {
    fn new() -> Result<Self> {
        Ok(Self { hidden: nn::Linear::new(16, 32)?, dropout: nn::Dropout::new(0.2)?, out: nn::Linear::new(32, 1)? })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let hidden = self.hidden.forward(x)?.relu();
        Ok(self.out.forward(&self.dropout.forward(&hidden)?)?)
    }
}

/// Trains to the end, from where the last process stopped.
fn train(folder: &Path) -> Result<()> {
    tch::manual_seed(7);
    let mut model = Net::new()?;
    let mut opt = AdamW::builder(&model).lr(0.02).build()?;
    let mut sched = LrScheduler::new(&mut opt, CosineAnnealingLr::new(STEPS))?;
    let mut rng = RngState::new(Device::Cpu);

    let mut checkpoint = Checkpoint::builder(folder).every(5).keep(2).on_signal(true).build()?;
    let resumed = checkpoint.resume(&mut [
        ("model", &mut model),
        ("optimizer", &mut opt),
        ("schedule", &mut sched),
        ("rng", &mut rng),
    ])?;
    let first = resumed.map_or(1, |resumed| resumed.step + 1);
    println!("from step {first}");
    for step in first..=STEPS {
        // Data and dropout both use the random generator, whose state is saved.
        let x = Tensor::randn([32, 16], (Kind::Float, Device::Cpu));
        let loss = (model.forward(&x)? - x.sum_dim_intlist(1, true, Kind::Float)).square().mean(Kind::Float);
        loss.backward();
        opt.step()?;
        opt.zero_grad()?;
        sched.step(&mut opt)?;
        println!("step {step}: loss {:.4}", loss.double_value(&[]));
        if checkpoint.due(step)? {
            checkpoint.set("last_loss", &loss.double_value(&[]))?;
            checkpoint.save(step, &[("model", &model), ("optimizer", &opt), ("schedule", &sched), ("rng", &rng)])?;
        }
        if checkpoint.stop_requested() {
            break;
        }
    }
    Ok(checkpoint.finish()?)
}

/// Runs this program again, and kills it after this many lines, if given.
fn process(folder: &Path, killed_after: Option<usize>) -> Result<()> {
    let mut child = Command::new(std::env::current_exe()?).arg(folder).stdout(Stdio::piped()).spawn()?;
    let lines = BufReader::new(child.stdout.take().context("no output")?).lines();
    for (number, line) in lines.enumerate() {
        let line = line?;
        if number == 0 {
            println!("a process runs {line}");
        }
        if killed_after == Some(number) {
            child.kill()?;
            println!("killed at {line}");
            break;
        }
    }
    let status = child.wait()?;
    ensure!(status.success() == killed_after.is_none(), "the process ended with {status}");
    Ok(())
}

fn main() -> Result<()> {
    if let Some(folder) = std::env::args_os().nth(1) {
        return train(Path::new(&folder));
    }
    let (whole, killed) = (tempfile::tempdir()?, tempfile::tempdir()?);
    process(whole.path(), None)?;
    println!();
    for lines in KILLED_AFTER {
        process(killed.path(), Some(lines))?;
    }
    process(killed.path(), None)?;
    for name in ["manifest.json", "model.safetensors", "optimizer.safetensors", "rng.safetensors"] {
        let last = |folder: &Path| fs::read(folder.join(format!("step-{STEPS:012}")).join(name));
        ensure!(last(whole.path())? == last(killed.path())?, "{name} differs");
    }
    println!("\nthe same bytes as of the run that was never killed");
    Ok(())
}
