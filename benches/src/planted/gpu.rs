//! Loops that do not use a GPU fully.

use anyhow::Result;
use overdrive::ffi::context::set_matmul_allow_tf32;
use overdrive::prelude::*;
use overdrive_profile::{Phase, RunProfile, record_function};
use tch::nn::VarStore;

use super::training::{Trainer, batch, start_timer};
use super::{Form, Plan};
use crate::model::{Mlp, cross_entropy};

const GPU: Device = Device::Cuda(0);

/// Batches of 12 MB are copied from pageable memory, and the host waits for each copy. Remedied: they are copied from
/// pinned memory with `non_blocking`.
pub fn no_pinning(form: Form, plan: &Plan) -> Result<RunProfile> {
    const WIDTH: i64 = 3 * 64 * 64;
    set_matmul_allow_tf32(true)?;
    let mut trainer = Trainer::mlp(GPU, &[WIDTH, 2048, 2048, 10])?;
    let (inputs, targets) = batch(256, &[WIDTH]);
    let is_pinned = form == Form::Remedied;
    let (inputs, targets) = match is_pinned {
        true => (inputs.f_pin_memory(GPU)?, targets.f_pin_memory(GPU)?),
        false => (inputs, targets),
    };
    let timer = start_timer(plan, GPU)?;
    for _ in 0..plan.all_steps() {
        let (inputs, targets) = {
            let _phase = timer.phase(Phase::HostToDevice);
            let _scope = record_function("copy");
            let copy = |tensor: &Tensor| tensor.f_to_device_(GPU, tensor.kind(), is_pinned, false);
            (copy(&inputs)?, copy(&targets)?)
        };
        trainer.step(&timer, &inputs, &targets)?;
    }
    Ok(timer.finish()?)
}

/// Every step reads its loss on the host, which therefore cannot prepare the next batch while the GPU computes.
/// Remedied: losses are summed on the GPU, and the sum is read at the end.
pub fn item_each_step(form: Form, plan: &Plan) -> Result<RunProfile> {
    read_each_step(form, plan, |loss, _| Ok(loss.f_double_value(&[])?))
}

/// As [`item_each_step`], but what is read is a copy of the outputs in pageable memory.
pub fn copy_each_step(form: Form, plan: &Plan) -> Result<RunProfile> {
    read_each_step(form, plan, |_, outputs| Ok(f64::from(Vec::<f32>::try_from(outputs.detach().f_view([-1])?)?[0])))
}

fn read_each_step(form: Form, plan: &Plan, read: fn(&Tensor, &Tensor) -> Result<f64>) -> Result<RunProfile> {
    const SAMPLES: i64 = 200_000;
    const BATCH: i64 = 1024;
    set_matmul_allow_tf32(true)?;
    let mut trainer = Trainer::mlp(GPU, &[256, 4096, 4096, 10])?;
    let (all, all_targets) = batch(SAMPLES, &[256]);
    let (all, all_targets) = (all.f_to_device(GPU)?, all_targets.f_to_device(GPU)?);
    let mut total = Tensor::zeros([], (Kind::Float, GPU));
    let mut sum = 0.0;
    let timer = start_timer(plan, GPU)?;
    for _ in 0..plan.all_steps() {
        let order = Tensor::f_randperm(SAMPLES, (Kind::Int64, Device::Cpu))?.f_narrow(0, 0, BATCH)?;
        let order = order.f_pin_memory(GPU)?.f_to_device_(GPU, Kind::Int64, true, false)?;
        let (inputs, targets) = (all.f_index_select(0, &order)?, all_targets.f_index_select(0, &order)?);
        let (loss, outputs) = {
            let _phase = timer.phase(Phase::Forward);
            let outputs = trainer.forward(&inputs);
            (cross_entropy(&outputs, &targets), outputs)
        };
        trainer.learn(&timer, &loss)?;
        {
            let _scope = record_function("metrics");
            match form {
                Form::Planted => sum += read(&loss, &outputs)?,
                Form::Remedied => total += loss.detach(),
            }
        }
        timer.step(BATCH as u64);
    }
    let run = timer.finish()?;
    sum += total.f_double_value(&[])?;
    anyhow::ensure!(sum.is_finite(), "the sum of the losses is {sum}");
    Ok(run)
}

/// Products of large matrices in full float32 precision. Remedied: TF32 is allowed, which tensor cores support.
pub fn float32_products(form: Form, plan: &Plan) -> Result<RunProfile> {
    set_matmul_allow_tf32(form == Form::Remedied)?;
    let mut trainer = Trainer::mlp(GPU, &[2048, 4096, 4096, 10])?;
    let (inputs, targets) = batch(1024, &[2048]);
    let (inputs, targets) = (inputs.f_to_device(GPU)?, targets.f_to_device(GPU)?);
    let timer = start_timer(plan, GPU)?;
    for _ in 0..plan.all_steps() {
        trainer.step(&timer, &inputs, &targets)?;
    }
    Ok(timer.finish()?)
}

/// 16 MB of activations between two layers are copied to the host and back, and so is their gradient. Remedied: they
/// stay on the GPU.
pub fn swapping_to_host(form: Form, plan: &Plan) -> Result<RunProfile> {
    set_matmul_allow_tf32(true)?;
    let vs = VarStore::new(GPU);
    let first = Mlp::new(&(vs.root() / "first"), &[1024, 4096]);
    let second = Mlp::new(&(vs.root() / "second"), &[4096, 4096, 10]);
    let mut trainer = Trainer::new(&vs, move |inputs| {
        let hidden = first.forward(inputs).relu();
        let hidden = match form {
            Form::Planted => hidden.to_device(Device::Cpu).to_device(GPU),
            Form::Remedied => hidden,
        };
        second.forward(&hidden)
    })?;
    let (inputs, targets) = batch(1024, &[1024]);
    let (inputs, targets) = (inputs.f_to_device(GPU)?, targets.f_to_device(GPU)?);
    let timer = start_timer(plan, GPU)?;
    for _ in 0..plan.all_steps() {
        trainer.step(&timer, &inputs, &targets)?;
    }
    Ok(timer.finish()?)
}
