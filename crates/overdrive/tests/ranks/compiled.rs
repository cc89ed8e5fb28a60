//! A compiled loss under DDP, beside the same model uncompiled.

use anyhow::{Context, Result, ensure};
use overdrive::nn::{self, sequential};
use overdrive::prelude::*;
use overdrive_compile as compile;
use overdrive_ddp::{DistributedDataParallel, ReduceOp};

use crate::harness::Meeting;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn model() -> Result<nn::Sequential> {
    manual_seed(1);
    Ok(sequential![
        // Normalization would make a bias meaningless, and AdamW enlarge the rounding of its gradient.
        nn::Linear::builder(6, 32).bias(false).build()?,
        nn::BatchNorm1d::new(32)?,
        nn::Relu,
        nn::Dropout::new(0.1)?,
        nn::Linear::new(32, 3)?,
    ])
}

/// Each rank has its own samples; the gradients' average makes the models equal.
pub fn scenario(meeting: &Meeting) -> Result<()> {
    if let Err(error) = compile::check_compiler() {
        println!("skipped: {error}");
        return Ok(());
    }
    let group = meeting.group()?;
    let (plain, compiled) = (model()?, model()?);
    let (plain_ddp, ddp) =
        (DistributedDataParallel::new(&plain, &group)?, DistributedDataParallel::new(&compiled, &group)?);
    let (mut plain_opt, mut opt) = (AdamW::builder(&plain).build()?, AdamW::builder(&compiled).build()?);
    let strict = || compile::Options { strict: true, ..Default::default() };
    let loss = |batch: &[Tensor]| -> compile::LossResult {
        Ok((compiled.forward(&batch[0])? - &batch[1]).square().mean(Kind::Float))
    };
    let mut loss_of = compile::loss(&compiled, loss).options(strict());
    for step in 0..100 {
        let seed = 1000 * step + group.rank() as i64;
        manual_seed(seed);
        let batch = [Tensor::randn([8, 6], FLOAT), Tensor::randn([8, 3], FLOAT)];
        manual_seed(seed);
        let expected = plain_ddp.forward(|| plain.forward(&batch[0]))??;
        let expected = (expected - &batch[1]).square().mean(Kind::Float);
        plain_ddp.backward(&expected)?;
        manual_seed(seed);
        let loss = ddp.forward(|| loss_of.run(&batch))??;
        ddp.backward(&loss)?;
        let (loss, expected) = (loss.double_value(&[]), expected.double_value(&[]));
        ensure!((loss - expected).abs() <= 1e-5 * expected, "step {step}: {loss}, but {expected} uncompiled");
        for opt in [&mut plain_opt, &mut opt] {
            opt.step()?;
            opt.zero_grad()?;
        }
    }
    ensure!(loss_of.why_eager().is_none());
    for (one, other) in plain.named_parameters().iter().zip(compiled.named_parameters()) {
        ensure!(one.tensor().allclose(other.tensor(), 1e-4, 1e-5, false), "{:?}", one.name());
    }
    for ((name, one), (_, other)) in plain.named_buffers().iter().zip(compiled.named_buffers()) {
        ensure!(one.allclose(&other, 1e-4, 1e-5, false), "{name}");
    }

    // Communication within the closure cannot be recorded, and is named with its line.
    let mut refused = compile::loss(&compiled, |batch| {
        let mut mean = loss(batch)?;
        group.all_reduce(&mut mean, ReduceOp::Avg)?;
        Ok(mean)
    })
    .options(strict());
    let batch = [Tensor::randn([8, 6], FLOAT), Tensor::randn([8, 3], FLOAT)];
    let error = (0..3).find_map(|_| refused.run(&batch).err()).context("communication was recorded")?.to_string();
    ensure!(error.contains("c10d::allreduce_") && error.contains("compiled.rs"), "{error}");
    Ok(())
}

/// A step within autocast and with a scale, over windows of micro-batches, as `compile::loss` and plain.
pub fn mixed(meeting: &Meeting) -> Result<()> {
    if let Err(error) = compile::check_compiler() {
        println!("skipped: {error}");
        return Ok(());
    }
    let group = meeting.group()?;
    for around in [false, true] {
        let (plain, compiled) = (model()?, model()?);
        let loss_in = |model: &nn::Sequential, batch: &[Tensor]| -> compile::LossResult {
            let _autocast = (!around).then(|| AutocastGuard::new(Device::Cpu, Kind::BFloat16)).transpose()?;
            Ok((model.forward(&batch[0])?.to_kind(Kind::Float) - &batch[1]).square().mean(Kind::Float))
        };
        let options = compile::Options { strict: true, ..Default::default() };
        let mut loss_of = compile::loss(&compiled, |batch| loss_in(&compiled, batch)).options(options);
        let train = |model: &nn::Sequential, loss_of: &mut dyn FnMut(&[Tensor]) -> Result<Tensor>| {
            let ddp = DistributedDataParallel::new(model, &group)?;
            let mut opt = Sgd::builder(model).lr(0.05).momentum(0.9).build()?;
            let mut accum = Accumulator::new(2)?.with_sync(&ddp);
            let mut scaler = GradScaler::builder(Device::Cpu).init_scale(1024.0).growth_interval(7).build()?;
            let mut losses = Vec::new();
            for micro in 0..40 {
                manual_seed(1000 * micro + group.rank() as i64);
                let batch = [Tensor::randn([8, 6], FLOAT), Tensor::randn([8, 3], FLOAT)];
                let guard = around.then(|| AutocastGuard::new(Device::Cpu, Kind::BFloat16)).transpose()?;
                let loss = ddp.forward(|| loss_of(&batch))??;
                drop(guard);
                losses.push(loss.double_value(&[]));
                accum.backward(&opt, &scaler.scale(&loss)?, Samples(8), micro % 2 == 1)?;
                if micro % 2 == 1 {
                    scaler.step(&mut opt)?;
                    scaler.update()?;
                    opt.zero_grad()?;
                }
            }
            Ok::<_, anyhow::Error>(losses)
        };
        let expected = train(&plain, &mut |batch| loss_in(&plain, batch).map_err(anyhow::Error::from_boxed))?;
        let losses = train(&compiled, &mut |batch| Ok(loss_of.run(batch)?))?;
        ensure!(loss_of.why_eager().is_none());
        for (step, (loss, expected)) in losses.iter().zip(&expected).enumerate() {
            ensure!((loss - expected).abs() <= 2e-2 * expected, "{around}: {step}: {loss}, but {expected} uncompiled");
        }
        // Both ranks have the same weights, to the bit.
        for parameter in compiled.named_parameters() {
            let mut of_all = parameter.tensor().detach().copy();
            group.broadcast(&mut of_all, 0)?;
            ensure!(of_all.equal(parameter.tensor()), "{:?} differs between ranks", parameter.name());
        }
    }
    Ok(())
}

/// A forward pass of the `DistributedDataParallel` within the closure would run while recording alone, and the gradients
/// of all later steps would stay local.
pub fn within(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let model = sequential![nn::Linear::new(6, 3)?];
    let ddp = DistributedDataParallel::new(&model, &group)?;
    let loss = |batch: &[Tensor]| -> compile::LossResult {
        let outputs = ddp.forward(|| model.forward(&batch[0]))??;
        Ok((outputs - &batch[1]).square().mean(Kind::Float))
    };
    let equal = || -> Result<bool> {
        let weight = model.named_parameters()[0].tensor().detach();
        let mut of_first = weight.copy();
        group.broadcast(&mut of_first, 0)?;
        Ok(of_first.equal(&weight))
    };
    let batch = |step: i64| {
        manual_seed(1000 * step + group.rank() as i64);
        [Tensor::randn([8, 6], FLOAT), Tensor::randn([8, 3], FLOAT)]
    };
    let mut opt = AdamW::builder(&model).build()?;
    let mut loss_of = compile::loss(&model, loss);
    for step in 0..8 {
        // The first passes of a reducer do more than later ones.
        let loss = if step < 3 {
            loss(&batch(step)).map_err(anyhow::Error::from_boxed)?
        } else {
            loss_of.run(&batch(step))?
        };
        ddp.backward(&loss)?;
        opt.step()?;
        opt.zero_grad()?;
        ensure!(equal()?, "step {step} of a loss: the ranks' weights differ");
    }
    let why = loss_of.why_eager().context("it was compiled")?;
    ensure!(why.contains("ddp.forward(|| loss_of.run(&batch))") && why.contains("compiled.rs"), "{why}");
    let mut whole = compile::step(&model, loss);
    for step in 0..6 {
        let _ = whole.run(&mut opt, &batch(step))?;
        ensure!(equal()?, "step {step}: the ranks' weights differ");
    }
    let why = whole.why_eager().context("it was compiled")?;
    ensure!(why.contains("compile::loss"), "{why}");
    Ok(())
}
