//! Wrappers of sharded optimizers, and what they have of each rank alone, loaded by others.

use std::path::Path;

use anyhow::{Context, Result, ensure};
use overdrive_checkpoint::CheckpointError;
use overdrive_core::{IntoParameters, Optimizer, OptimizerError, Parameter, StateDict, Stateful};
use overdrive_ddp::ProcessGroup;
use overdrive_optim::{AdamW, Joint, Lookahead};
use overdrive_shard::{FullyShardedOptimizer, ZeroRedundancyOptimizer};

use crate::full::Sharded;
use crate::harness::Meeting;
use crate::model::{Model, data, same_state, step_alone};
use crate::resharded::{checkpoint, folder};

type Zero<O> = ZeroRedundancyOptimizer<O>;

fn adamw(params: Vec<Parameter>) -> Result<AdamW, OptimizerError> {
    AdamW::builder(params).lr(0.01).build()
}

fn slow<O: Optimizer>(inner: O) -> Result<Lookahead<O>, OptimizerError> {
    Lookahead::new(inner, 2, 0.5)
}

/// Two sharded optimizers, one in a `Lookahead`.
fn joint(model: &Model, group: &ProcessGroup) -> Result<Joint<Lookahead<Zero<AdamW>>, Zero<AdamW>>> {
    let (first, second): (Vec<Parameter>, Vec<Parameter>) =
        (&model.vs).into_parameters().into_iter().partition(|it| it.name().is_some_and(|name| name.contains("weight")));
    let first = slow(Zero::new(first, group, adamw)?)?;
    Ok(Joint::new(first, Zero::new(second, group, adamw)?)?)
}

/// The same of plain optimizers.
fn plain(model: &Model) -> Result<Joint<Lookahead<AdamW>, AdamW>> {
    let (first, second): (Vec<Parameter>, Vec<Parameter>) =
        (&model.vs).into_parameters().into_iter().partition(|it| it.name().is_some_and(|name| name.contains("weight")));
    Ok(Joint::new(slow(adamw(first)?)?, adamw(second)?)?)
}

fn save(folder: &Path, group: &ProcessGroup, opt: &dyn Stateful) -> Result<()> {
    let mut checkpoint = checkpoint(folder, group)?;
    checkpoint.save(1, &[("optimizer", opt)])?;
    Ok(checkpoint.finish()?)
}

/// Loads it on rank 0 alone.
fn load(folder: &Path, alone: &ProcessGroup, opt: &mut dyn Stateful) -> Result<Result<(), CheckpointError>> {
    Ok(checkpoint(folder, alone)?.resume(&mut [("optimizer", opt)]).map(drop))
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let folder = folder()?;
    let model = Model::new(1);
    let mut opt = joint(&model, &group)?;
    for step in 0..3 {
        step_alone(&model, &mut opt, &data(step, 0, 0), None)?;
    }
    save(&folder.join("joint"), &group, &opt)?;
    let mut within = Zero::new(&model.vs, &group, |params| slow(adamw(params)?))?;
    step_alone(&model, &mut within, &data(0, 0, 0), None)?;
    save(&folder.join("within"), &group, &within)?;
    let sharded = Sharded::new(&group, 1)?;
    let rows: FullyShardedOptimizer<AdamW> = sharded.fsdp.optimizer(adamw)?;
    let mut around = slow(rows)?;
    for step in 0..2 {
        sharded.fsdp.backward(&sharded.loss(&data(step, 0, 0))?)?;
        around.step()?;
        around.zero_grad()?;
    }
    save(&folder.join("around"), &group, &around)?;

    let Some(alone) = group.new_group(&[0])? else { return Ok(()) };
    let other = Model::new(2);
    let mut resumed = joint(&other, &alone)?;
    load(&folder.join("joint"), &alone, &mut resumed)??;
    let expected = Model::new(1);
    let mut single = plain(&expected)?;
    for step in 0..3 {
        step_alone(&expected, &mut single, &data(step, 0, 0), None)?;
    }
    same_state(&whole(resumed.state_dict()?)?, &single.state_dict()?)?;
    let refused = |name: &str, opt: &mut dyn Stateful| -> Result<()> {
        let told = load(&folder.join(name), &alone, opt)?.err().context("it was loaded")?;
        let is_it = match &told {
            // It says so itself, or its slow weights are rows that say nothing of the whole.
            CheckpointError::OtherRanks { part, saved: 2 } => name == "within" && part == "optimizer",
            CheckpointError::RanksDiffer { part, entry, saved: 2 } => {
                name == "around" && part == "optimizer" && entry.contains("slow")
            }
            _ => false,
        };
        ensure!(is_it, "{name}: {told:?}");
        Ok(())
    };
    refused("within", &mut Zero::new(&other.vs, &alone, |params| slow(adamw(params)?))?)?;
    let sharded = Sharded::new(&alone, 1)?;
    let rows: FullyShardedOptimizer<AdamW> = sharded.fsdp.optimizer(adamw)?;
    refused("around", &mut slow(rows)?)
}

/// The same state without the mark that it is the part of one rank, which has all of it.
fn whole(state: StateDict) -> Result<StateDict> {
    let mut whole = StateDict::new();
    state.into_iter().for_each(|(key, entry)| whole.insert(key, entry));
    Ok(whole)
}
