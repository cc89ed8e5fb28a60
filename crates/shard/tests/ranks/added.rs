//! What one rank has or does alone while a model is sharded, or after.

use anyhow::{Result, ensure};
use overdrive_core::Optimizer;
use overdrive_ddp::{ProcessGroup, ReduceOp};
use overdrive_ffi::host_memory;
use overdrive_optim::Sgd;
use overdrive_shard::{FullyShardedDataParallel, ShardError, ShardedDataParallel, ZeroRedundancyOptimizer};
use tch::nn::{self, Module};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;

const SIZE: i64 = 64;

fn inputs() -> Tensor {
    Tensor::ones([2, SIZE], (Kind::Float, Device::Cpu))
}

fn linear(vs: &nn::VarStore, name: &str) -> nn::Linear {
    nn::linear(vs.root() / name, SIZE, SIZE, Default::default())
}

/// A rank that has added parameters names the first; the others name the rank.
fn named(rank: usize, has_added: &[usize], told: &Result<(), String>) -> Result<()> {
    let text = told.as_ref().map_or_else(Clone::clone, |()| "no error".to_owned());
    let expected = match has_added.contains(&rank) {
        true => "`later.",
        false => "rank 1",
    };
    ensure!(text.contains(expected) && text.contains("added to the model after"), "{rank}: {text}");
    Ok(())
}

pub fn later(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let rank = group.rank();
    for has_added in [&[0, 1][..], &[1]] {
        let add = |vs: &nn::VarStore| has_added.contains(&rank).then(|| linear(vs, "later"));
        let build = |params| Sgd::builder(params).lr(0.1).build();

        let vs = nn::VarStore::new(Device::Cpu);
        let first = linear(&vs, "first");
        let mut opt = ZeroRedundancyOptimizer::new(&vs, &group, build)?;
        let sharded = ShardedDataParallel::new(&mut opt)?;
        let _later = add(&vs);
        sharded.backward(&first.forward(&inputs()).sum(Kind::Float))?;
        let before = first.ws.sum(Kind::Double).double_value(&[]);
        named(rank, has_added, &opt.step().map_err(|error| error.to_string()))?;
        ensure!(first.ws.sum(Kind::Double).double_value(&[]) == before, "nothing is stepped");

        let vs = nn::VarStore::new(Device::Cpu);
        let first = linear(&vs, "first");
        let model = FullyShardedDataParallel::builder(&group)?.build(&vs)?;
        let mut opt = model.optimizer(build)?;
        let _later = add(&vs);
        let outputs = model.forward(inputs(), |x| first.forward(&x))?;
        model.backward(&outputs.sum(Kind::Float))?;
        named(rank, has_added, &opt.step().map_err(|error| error.to_string()))?;
    }
    Ok(())
}

fn still_meet(group: &ProcessGroup) -> Result<()> {
    let mut sum = Tensor::from(1.0);
    group.all_reduce(&mut sum, ReduceOp::Sum)?;
    ensure!(sum.double_value(&[]) == group.size() as f64);
    Ok(())
}

/// Memory ends on rank 1 at the first of several parameters.
pub fn out_of_memory(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let vs = nn::VarStore::new(Device::Cpu);
    let _layers: Vec<nn::Linear> = (0..4).map(|number| linear(&vs, &format!("layer{number}"))).collect();
    host_memory::count(usize::MAX)?;
    let mut sharding = FullyShardedDataParallel::builder(&group)?;
    let params = overdrive_core::IntoParameters::into_parameters(&vs);
    if group.rank() == 1 {
        host_memory::count(host_memory::stats()?.allocated as usize + (SIZE * SIZE) as usize)?;
    }
    let told = sharding.unit("all", params).map(drop);
    host_memory::count(usize::MAX)?;
    match (group.rank(), &told) {
        (1, Err(ShardError::Torch(error))) => ensure!(error.to_string().contains("out of memory"), "{error}"),
        (_, Err(ShardError::OtherRank { rank: 1, reason, .. })) => {
            ensure!(reason.contains("out of memory"), "{reason}");
        }
        _ => anyhow::bail!("{told:?}"),
    }
    still_meet(&group)
}
