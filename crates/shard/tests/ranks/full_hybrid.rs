//! ZeRO-3 within groups of ranks, and replicas over them.

use anyhow::{Context, Result, ensure};
use overdrive_accum::{Accumulator, Samples};
use overdrive_core::{IntoParameters, Optimizer, Stateful};
use overdrive_ffi::set_grad;
use overdrive_shard::{DeviceMesh, FullyShardedDataParallel, ShardError};
use tch::Tensor;

use crate::full::{Opt, Sharded};
use crate::harness::Meeting;
use crate::model::{DOUBLE, Model, SAMPLES, close, data, large_batch, step_alone, tensors};
use crate::zero::adamw;

const STEPS: usize = 50;

/// Windows that one rank closes with nothing: it takes part in the others' passes, whose units are ready before its own.
pub fn with_nothing(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let (rank, ranks) = (group.rank(), group.size());
    let mesh = DeviceMesh::new(&group, &[("replicate", 2), ("shard", 2)])?;
    let builder = FullyShardedDataParallel::hybrid(&mesh, "replicate", "shard")?;
    let sharded = Sharded::over(builder, 1, &[0, 1, 2, 3], (mesh.coordinate()[1], 2))?;
    let (alone, opt) = (Model::new(1), sharded.fsdp.optimizer(adamw)?);
    for step in 0..4 {
        let mut accum = Accumulator::new(1)?.with_sync(&sharded.fsdp);
        let loss = sharded.loss(&data(step, 0, rank))?;
        let nothing = step % ranks;
        accum.backward(&opt, &loss, Samples(if rank == nothing { 0 } else { SAMPLES }), true)?;
        let parts: Vec<_> = (0..ranks).filter(|other| *other != nothing).map(|other| data(step, 0, other)).collect();
        let (inputs, targets): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
        alone.loss(&(Tensor::cat(&inputs, 0), Tensor::cat(&targets, 0))).backward();
    }
    sharded.gradients_close_to(&alone)
}

/// Sharded over pairs of 4 ranks, or over all or none of them, and replicated over the rest.
pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let (rank, ranks) = (group.rank(), group.size());
    for shape in [[2, 2], [4, 1], [1, 4]] {
        let mesh = DeviceMesh::new(&group, &[("replicate", shape[0]), ("shard", shape[1])])?;
        let part = (mesh.coordinate()[1], shape[1]);
        let build = |seed: i64| {
            let builder = FullyShardedDataParallel::hybrid(&mesh, "replicate", "shard")?;
            Sharded::over(builder, seed, &[1, 2], part)
        };
        let sharded = build(1 + rank as i64)?;
        let alone = Model::new(1);
        let mut opt: Opt = sharded.fsdp.optimizer(adamw)?;
        let mut single = adamw((&alone.vs).into_parameters())?;
        for step in 0..if shape == [2, 2] { STEPS } else { 5 } {
            sharded.fsdp.backward(&sharded.loss(&data(step, 0, rank))?)?;
            let norm = sharded.fsdp.clip_grad_norm_(0.5)?.double_value(&[]);
            let norms = group.all_gather_object(&norm)?;
            ensure!(norms.iter().all(|it| (*it - norm).abs() < 1e-12), "{norms:?}");
            opt.step()?;
            opt.zero_grad()?;
            step_alone(&alone, &mut *single, &large_batch(step, 1, ranks), Some(0.5))?;
            sharded.close_to(&alone).with_context(|| format!("{shape:?}, step {step}"))?;
        }
        // The whole state on any rank, and another model from it.
        for to in [0, ranks - 1] {
            let (model, state) = (sharded.fsdp.consolidate_state_dict(to)?, opt.consolidate_state_dict(to)?);
            ensure!(model.is_some() == (rank == to) && state.is_some() == (rank == to));
            if let Some(model) = model {
                close(&tensors(&model), &alone.values())?;
            }
        }
        let mut other = build(5)?;
        other.fsdp.load_state_dict(&sharded.fsdp.state_dict()?)?;
        other.close_to(&alone)?;
        // One rank fails: an error on all, also on those that have other parts.
        let told = sharded.fsdp.try_forward(data(0, 0, rank).0, |x| {
            let x = sharded.layer(0, x)?;
            if rank == 1 {
                return Err(ShardError::Unit { name: "mine".to_owned(), reason: "a failure of the test".to_owned() });
            }
            sharded.layer(1, x)
        });
        ensure!(told.is_err(), "{told:?}");
        sharded.fsdp.backward(&sharded.loss(&data(0, 0, rank))?)?;
        opt.zero_grad()?;
        // Gradients that one rank cannot add to: its replicas do not wait for it.
        let loss = sharded.loss(&data(0, 0, rank))?;
        if rank == 1 {
            for param in sharded.fsdp.parameters().into_iter().filter(|it| it.tensor().numel() > 1) {
                let one = Tensor::ones([1], DOUBLE).expand(param.tensor().size(), false);
                set_grad(param.tensor(), Some(&one))?;
            }
        }
        let told = sharded.fsdp.backward(&loss);
        ensure!(told.is_err() == (rank == 1), "{told:?}");
        let told = if rank == 1 { Ok(()) } else { opt.step() };
        ensure!(told.is_err() == (rank != 1), "{told:?}");
        opt.zero_grad()?;
        sharded.fsdp.backward(&sharded.loss(&data(0, 0, rank))?)?;
    }
    let mesh = DeviceMesh::new(&group, &[("host", 2), ("replicate", 1), ("shard", 2)])?;
    for (replicate, shard) in [("replicate", "shard"), ("shard", "shard"), ("none", "shard")] {
        let told = FullyShardedDataParallel::hybrid(&mesh, replicate, shard).map(drop);
        ensure!(matches!(told, Err(ShardError::MeshNames { .. } | ShardError::NoSuchDimension { .. })), "{told:?}");
    }
    Ok(())
}
