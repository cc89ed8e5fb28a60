//! A rank that is gone is an error on the others.

use anyhow::{Result, ensure};
use overdrive_core::{Optimizer, OptimizerError};
use overdrive_ddp::DdpError;
use overdrive_shard::{DeviceMesh, ShardError, ShardedDataParallel, ZeroRedundancyOptimizer};

use crate::harness::Meeting;
use crate::model::{Model, data};
use crate::zero::sgd;

pub fn in_a_step(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let model = Model::new(1);
    let mut opt = ZeroRedundancyOptimizer::new(&model.vs, &group, sgd)?;
    if group.rank() == 1 {
        return Ok(());
    }
    model.loss(&data(0, 0, 0)).backward();
    let before = model.values();
    let told = opt.step();
    ensure!(matches!(told, Err(OptimizerError::Sync(_))), "{told:?}");
    crate::model::same(&model.values(), &before)
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
    Ok(())
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
