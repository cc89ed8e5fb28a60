//! A compiled loss under DDP, beside the same model uncompiled.

use anyhow::{Result, ensure};
use overdrive::nn::{self, sequential};
use overdrive::prelude::*;
use overdrive_compile as compile;
use overdrive_ddp::DistributedDataParallel;

use crate::harness::Meeting;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn model() -> Result<nn::Sequential> {
    manual_seed(1);
    Ok(sequential![nn::Linear::new(6, 32)?, nn::Relu, nn::Linear::new(32, 3)?])
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
    let mut loss_of =
        compile::loss(&compiled, |batch| Ok((compiled.forward(&batch[0])? - &batch[1]).square().mean(Kind::Float)))
            .options(compile::Options { strict: true, ..Default::default() });
    for step in 0..10 {
        manual_seed(100 * step + group.rank() as i64);
        let batch = [Tensor::randn([8, 6], FLOAT), Tensor::randn([8, 3], FLOAT)];
        let expected = plain_ddp.forward(|| plain.forward(&batch[0]))??;
        let expected = (expected - &batch[1]).square().mean(Kind::Float);
        plain_ddp.backward(&expected)?;
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
        ensure!(one.tensor().allclose(other.tensor(), 1e-5, 1e-6, false), "{:?}", one.name());
    }
    Ok(())
}
