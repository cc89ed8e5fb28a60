//! ZeRO-3 gradients that add up: within one pass, and over passes that leave them local.

use anyhow::{Context, Result, ensure};
use overdrive_core::{Optimizer, TorchError};
use overdrive_ddp::ProcessGroup;
use overdrive_shard::FullyShardedDataParallel;
use tch::{Device, Kind, Tensor};

use crate::full::{Opt, Sharded};
use crate::full_edges::{gradients_are_those_of, inputs, named, weights};
use crate::harness::Meeting;
use crate::model::data;
use crate::zero::sgd;

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    twice_in_a_pass(&group).context("two backward runs in one pass")?;
    clipped_in_a_window(&group).context("clipping in a window")?;
    held_in_float32(&group).context("a window in mixed precision")
}

/// Two graphs run in one pass, of which the first uses a part of the unit.
fn twice_in_a_pass(group: &ProcessGroup) -> Result<()> {
    let weights = weights(2);
    let whole: Vec<Tensor> = weights.iter().map(|it| it.detach().copy()).collect();
    let mut builder = FullyShardedDataParallel::builder(group)?;
    let unit = builder.unit("unit", named(&weights))?;
    let fsdp = builder.build(named(&weights))?;
    let one = |weights: &[Tensor], x: &Tensor| x.matmul(&weights[0]).square().sum(Kind::Double);
    let both = |weights: &[Tensor], x: &Tensor| x.matmul(&weights[0]).tanh().matmul(&weights[1]).sum(Kind::Double);
    let x = inputs(group.rank());
    let first = unit.forward(x.shallow_clone(), |x| one(&weights, &x))?;
    let second = unit.forward(x, |x| both(&weights, &x))?;
    fsdp.backward_with(|| {
        first.f_backward().map_err(TorchError::from)?;
        Ok(second.f_backward()?)
    })?;
    gradients_are_those_of(&fsdp, &whole, |weights, x| one(weights, &x) + both(weights, &x))
}

/// Gradients that were not averaged are not clipped.
fn clipped_in_a_window(group: &ProcessGroup) -> Result<()> {
    let sharded = Sharded::new(group, 1)?;
    let mut opt: Opt = sharded.fsdp.optimizer(sgd)?;
    let held = sharded.fsdp.no_sync();
    sharded.fsdp.backward(&sharded.loss(&data(0, 0, group.rank()))?)?;
    drop(held);
    let told = sharded.fsdp.clip_grad_norm_(1.0).map(drop).expect_err("gradients of this rank alone");
    ensure!(told.to_string().contains("have left gradients local"), "{told}");
    sharded.fsdp.backward(&sharded.loss(&data(1, 0, group.rank()))?)?;
    ensure!(sharded.fsdp.clip_grad_norm_(1.0)?.double_value(&[]) > 0.0);
    Ok(opt.step()?)
}

/// Gradients of bfloat16 add up in the dtype in which they are averaged.
fn held_in_float32(group: &ProcessGroup) -> Result<()> {
    let bfloat = (Kind::BFloat16, Device::Cpu);
    let weight = Tensor::ones([4, 2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let builder = FullyShardedDataParallel::builder(group)?.mixed_precision(Kind::BFloat16, Some(Kind::Float));
    let fsdp = builder.build([("weight", &weight)])?;
    let mut opt: Opt = fsdp.optimizer(sgd)?;
    let pass = || {
        let loss = fsdp.forward(Tensor::ones([1, 4], bfloat), |x| x.matmul(&weight))?;
        fsdp.backward(&loss.sum(Kind::Float))
    };
    // A window that is given up leaves nothing.
    let held = fsdp.no_sync();
    pass()?;
    drop(held);
    opt.zero_grad()?;
    let held = fsdp.no_sync();
    for _ in 0..300 {
        pass()?;
    }
    drop(held);
    pass()?;
    let grad = fsdp.parameters()[0].tensor().grad();
    ensure!(grad.eq(301.0).all().int64_value(&[]) == 1, "bfloat16 counts to 256: {grad}");
    Ok(())
}
