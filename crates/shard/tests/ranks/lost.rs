//! A rank that is gone is an error on the others.

use anyhow::{Result, ensure};
use overdrive_core::{GradientSync, Optimizer, OptimizerError};
use overdrive_ddp::DdpError;
use overdrive_ffi::{ErrorKind, host_memory};
use overdrive_optim::Sgd;
use overdrive_shard::{DeviceMesh, ShardError, ShardedDataParallel, ZeroRedundancyOptimizer};

use tch::{Kind, Tensor};

use crate::harness::Meeting;
use crate::model::{DOUBLE, Model, data};
use crate::zero::sgd;

/// Nothing is sent, and no gradient is made, after communication has failed.
fn is_over(opt: &mut dyn Optimizer, sharded: &ShardedDataParallel, model: &Model) -> Result<()> {
    let is_refused = |told: Result<(), ShardError>| {
        let told = told.expect_err("it goes on after communication has failed");
        ensure!(matches!(told, ShardError::Optimizer(OptimizerError::NotNow { .. })), "{told:?}");
        let text = told.to_string();
        ensure!(text.contains(" cannot go on: communication has failed") && text.contains("start anew"), "{text}");
        Ok(())
    };
    is_refused(opt.step().map_err(ShardError::from))?;
    is_refused(sharded.backward(&model.loss(&data(1, 0, 0))))?;
    is_refused(sharded.clip_grad_norm_(1.0).map(drop))?;
    let _held = sharded.no_sync();
    is_refused(sharded.backward(&model.loss(&data(1, 0, 0))))
}

pub fn in_a_step(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let model = Model::new(1);
    let mut opt = ZeroRedundancyOptimizer::new(&model.vs, &group, sgd)?;
    let sharded = ShardedDataParallel::new(&mut opt)?;
    sharded.backward(&model.loss(&data(0, 0, 0)))?;
    if group.rank() == 1 {
        return Ok(());
    }
    let before = model.values();
    let told = opt.step();
    ensure!(matches!(told, Err(OptimizerError::Sync(_))), "{told:?}");
    crate::model::same(&model.values(), &before)?;
    is_over(&mut opt, &sharded, &model)
}

pub fn in_backward(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let model = Model::new(1);
    let mut opt = ZeroRedundancyOptimizer::new(&model.vs, &group, sgd)?;
    let sharded = ShardedDataParallel::new(&mut opt)?;
    if group.rank() == 1 {
        return Ok(());
    }
    let told = sharded.backward(&model.loss(&data(0, 0, 0)));
    ensure!(matches!(told, Err(ShardError::Ddp(DdpError::Lost { .. }))), "{told:?}");
    ensure!(opt.params().iter().all(|param| !param.grad().defined()), "gradients are freed");
    is_over(&mut opt, &sharded, &model)
}

/// The counts of an accumulator.
pub fn in_a_sum(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let model = Model::new(1);
    let mut opt = ZeroRedundancyOptimizer::new(&model.vs, &group, sgd)?;
    let sharded = ShardedDataParallel::new(&mut opt)?;
    if group.rank() == 1 {
        return Ok(());
    }
    let told = sharded.start_sum(1.0).and_then(|wait| wait());
    ensure!(told.is_err(), "{told:?}");
    is_over(&mut opt, &sharded, &model)
}

/// Rank 1 has no memory for gradients that it sends together, and ends.
pub fn memory(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let params = [(); 4].map(|()| Tensor::ones([1 << 14], DOUBLE).set_requires_grad(true));
    let model = Model::new(1);
    let build = |params| Sgd::builder(params).lr(0.1).build();
    let mut opt =
        ZeroRedundancyOptimizer::new(params.iter().map(Tensor::shallow_clone).collect::<Vec<_>>(), &group, build)?;
    let sharded = ShardedDataParallel::new(&mut opt)?;
    let loss = params.iter().map(|param| param.sum(Kind::Double)).fold(Tensor::zeros([], DOUBLE), |sum, one| sum + one);
    host_memory::count(usize::MAX)?;
    if group.rank() == 1 {
        // For the gradients, of 128 KiB each, and not for the copies that are reduced.
        host_memory::count(host_memory::stats()?.allocated as usize + (600 << 10))?;
    }
    let told = sharded.backward(&loss);
    host_memory::count(usize::MAX)?;
    match group.rank() {
        1 => ensure!(
            matches!(&told, Err(ShardError::Torch(error)) if error.kind() == ErrorKind::OutOfMemory),
            "{told:?}"
        ),
        _ => ensure!(matches!(told, Err(ShardError::Ddp(DdpError::Lost { .. }))), "{told:?}"),
    }
    is_over(&mut opt, &sharded, &model)
}

pub fn in_a_mesh(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    group.barrier()?;
    if group.rank() == 1 {
        return Ok(());
    }
    let told = DeviceMesh::new(&group, &[("shard", 2)]).map(drop);
    ensure!(matches!(told, Err(ShardError::Ddp(DdpError::Lost { .. }))), "{told:?}");
    Ok(())
}
