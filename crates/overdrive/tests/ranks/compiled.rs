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
