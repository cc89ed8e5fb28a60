//! Loops with unnecessary work on the host.

use std::fs::{File, OpenOptions};
use std::io::{self, BufWriter, Write};

use anyhow::{Context, Result};
use overdrive::prelude::*;
use overdrive_profile::{Phase, RunProfile, record_function};
use tch::Reduction;
use tch::nn::VarStore;

use super::training::{Trainer, batch, start_timer};
use super::{Form, Plan};
use crate::model::{Mlp, cross_entropy};

/// The last layers run once for every row of a batch, in many small operators. Remedied: once for the whole batch.
pub fn tiny_kernels(form: Form, plan: &Plan) -> Result<RunProfile> {
    let vs = VarStore::new(Device::Cpu);
    let body = Mlp::new(&(vs.root() / "body"), &[512, 512, 512, 32]);
    let head = Mlp::new(&(vs.root() / "head"), &[32, 32, 32, 10]);
    let mut trainer = Trainer::new(&vs, move |inputs| {
        let features = body.forward(inputs);
        let _scope = record_function("head");
        match form {
            Form::Planted => {
                let rows: Vec<Tensor> = features.split(1, 0).iter().map(|row| head.forward(row)).collect();
                Tensor::cat(&rows, 0)
            }
            Form::Remedied => head.forward(&features),
        }
    })?;
    let (inputs, targets) = batch(64, &[512]);
    let timer = start_timer(plan, Device::Cpu)?;
    for _ in 0..plan.all_steps() {
        trainer.step(&timer, &inputs, &targets)?;
    }
    Ok(timer.finish()?)
}

/// Keeps every loss of a second batch with its autograd graph, about 2 MB per step. Remedied: keeps it detached.
pub fn memory_leak(form: Form, plan: &Plan) -> Result<RunProfile> {
    let mut trainer = Trainer::mlp(Device::Cpu, &[512, 512, 512, 10])?;
    let (inputs, targets) = batch(64, &[512]);
    let (held_out, held_out_targets) = batch(256, &[512]);
    let mut kept = Vec::new();
    let timer = start_timer(plan, Device::Cpu)?;
    for _ in 0..plan.all_steps() {
        {
            let _phase = timer.phase(Phase::Forward);
            let loss = cross_entropy(&trainer.forward(&held_out), &held_out_targets);
            kept.push(if form == Form::Planted { loss } else { loss.detach() });
        }
        trainer.step(&timer, &inputs, &targets)?;
    }
    Ok(timer.finish()?)
}

/// Every step opens a log file, writes each sample's loss to it without a buffer, and syncs it. Remedied: the file
/// stays open, writes are buffered, and nothing is synced.
pub fn slow_logging(form: Form, plan: &Plan) -> Result<RunProfile> {
    const BATCH: i64 = 256;
    // In the program's folder, which is usually on a disk; /tmp may be in memory.
    let program = std::env::current_exe()?;
    let folder = tempfile::tempdir_in(program.parent().context("the path of this program has no folder")?)?;
    let path = folder.path().join("losses.log");
    let mut buffered = BufWriter::with_capacity(1 << 20, File::create(folder.path().join("buffered.log"))?);

    let mut trainer = Trainer::mlp(Device::Cpu, &[784, 256, 10])?;
    let (inputs, targets) = batch(BATCH, &[784]);
    let timer = start_timer(plan, Device::Cpu)?;
    for step in 0..plan.all_steps() {
        let losses = {
            let _phase = timer.phase(Phase::Forward);
            sample_losses(&trainer.forward(&inputs), &targets)?
        };
        trainer.learn(&timer, &losses.mean(Kind::Float))?;
        let losses = Vec::<f32>::try_from(losses.detach())?;
        {
            let _scope = record_function("logging");
            match form {
                Form::Planted => {
                    let mut file = OpenOptions::new().create(true).append(true).open(&path)?;
                    write_lines(&mut file, step, &losses)?;
                    file.sync_all()?;
                }
                Form::Remedied => write_lines(&mut buffered, step, &losses)?,
            }
        }
        timer.step(BATCH as u64);
    }
    Ok(timer.finish()?)
}

fn write_lines(out: &mut impl Write, step: u64, losses: &[f32]) -> io::Result<()> {
    let mut numbered = losses.iter().enumerate();
    numbered.try_for_each(|(sample, loss)| writeln!(out, "step {step}, sample {sample}: {loss:.4}"))
}

/// Computes the weight of each sample in a loop on the host, which reads the losses out of a tensor one by one.
/// Remedied: computes all weights by tensor operators.
///
/// # Source
/// Lin et al. 2017, arXiv:1708.02002: the focal loss, with weights that gradients do not flow through
pub fn loss_in_a_loop(form: Form, plan: &Plan) -> Result<RunProfile> {
    const BATCH: i64 = 2048;
    let mut trainer = Trainer::mlp(Device::Cpu, &[128, 64, 10])?;
    let (inputs, targets) = batch(BATCH, &[128]);
    let timer = start_timer(plan, Device::Cpu)?;
    for _ in 0..plan.all_steps() {
        let loss = {
            let _phase = timer.phase(Phase::Forward);
            let logits = trainer.forward(&inputs);
            let _scope = record_function("loss");
            let losses = sample_losses(&logits, &targets)?;
            let weights = focal_weights(&losses.detach(), form);
            (losses * weights).mean(Kind::Float)
        };
        trainer.learn(&timer, &loss)?;
        timer.step(BATCH as u64);
    }
    Ok(timer.finish()?)
}

/// `(1 - p)^2`, where `p` is the predicted probability of the right class.
fn focal_weights(losses: &Tensor, form: Form) -> Tensor {
    match form {
        Form::Planted => {
            let weight = |sample: i64| (1.0 - (-losses.double_value(&[sample])).exp()).powi(2) as f32;
            Tensor::from_slice(&(0..losses.size()[0]).map(weight).collect::<Vec<_>>())
        }
        Form::Remedied => (1f64 - losses.neg().exp()).square(),
    }
}

/// The cross-entropy of each sample.
fn sample_losses(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    Ok(logits.f_cross_entropy_loss::<Tensor>(targets, None, Reduction::None, -100, 0.0)?)
}
