//! States of a fully sharded model: each rank's rows in a checkpoint, the whole for a plain model and back, and another
//! number of ranks.

use std::path::PathBuf;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use overdrive_checkpoint::{Checkpoint, Writers};
use overdrive_core::{IntoParameters, Optimizer, Parameter, StateDict, StateError, Stateful};
use overdrive_ddp::ProcessGroup;
use overdrive_shard::{FullyShardedDataParallel, FullyShardedOptimizer, ShardError};
use tch::{Device, Kind, Tensor};

use crate::full::{Opt, Sharded};
use crate::harness::{Meeting, all_through, free_port, start};
use crate::model::{Model, data, same, same_state, step_alone, tensors};
use crate::optimizers::{element_wise, element_wise_of_bfloat16, parameters};
use crate::zero::{Build, adamw};

const FOLDER: &str = "OVERDRIVE_TEST_FOLDER";

pub fn run() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let port = free_port();
    let vars = [(FOLDER, folder.path().to_str().context("a path in UTF-8")?)];
    let ranks = (0..3).map(|rank| start("full_saved", rank, 3, port, &vars)).collect::<Result<Vec<_>>>()?;
    all_through(ranks, Instant::now()).map(drop)
}

fn train(sharded: &Sharded, opt: &mut Opt, steps: std::ops::Range<usize>) -> Result<()> {
    for step in steps {
        // The same on all ranks, so that any number of them makes the same steps.
        sharded.fsdp.backward(&sharded.loss(&data(step, 0, 0))?)?;
        opt.step()?;
        opt.zero_grad()?;
    }
    Ok(())
}

fn rows(sharded: &Sharded) -> Vec<(String, Tensor)> {
    let named = |param: &Parameter| (param.name().unwrap_or_default().to_owned(), param.tensor().detach().copy());
    sharded.fsdp.parameters().iter().map(named).collect()
}

/// Each rank's rows are written and read by that rank.
pub fn saved(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let folder = PathBuf::from(std::env::var_os(FOLDER).context(FOLDER)?);
    let sharded = Sharded::new(&group, 1)?;
    let mut opt: Opt = sharded.fsdp.optimizer(adamw)?;
    train(&sharded, &mut opt, 0..3)?;
    let each = || Checkpoint::builder(folder.join("each")).ranks(group.clone(), Writers::Each).build();
    let mut checkpoint = each()?;
    checkpoint.save(3, &[("model", &sharded.fsdp), ("optimizer", &opt)])?;
    checkpoint.finish()?;
    train(&sharded, &mut opt, 3..6)?;
    let expected = rows(&sharded);

    let mut resumed = Sharded::new(&group, 2)?;
    let mut other: Opt = resumed.fsdp.optimizer(adamw)?;
    let parts: &mut [(&str, &mut dyn Stateful)] = &mut [("model", &mut resumed.fsdp), ("optimizer", &mut other)];
    ensure!(each()?.resume(parts)?.is_some_and(|found| found.step == 3));
    train(&resumed, &mut other, 3..6)?;
    same(&rows(&resumed), &expected)
}

/// On all ranks, what rank 0 has consolidated.
fn on_all(
    group: &ProcessGroup,
    consolidate: impl Fn(usize) -> Result<Option<StateDict>, ShardError>,
) -> Result<StateDict> {
    let mut own = None;
    for to in 0..group.size() {
        let whole = consolidate(to)?;
        ensure!(whole.is_some() == (group.rank() == to));
        own = whole.or(own);
    }
    own.context("a whole state")
}

/// The whole state is a plain run's, to the bit; plain runs and fewer ranks go on from it, and the other way round.
pub fn whole(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let sharded = Sharded::new(&group, 1)?;
    let mut opt: Opt = sharded.fsdp.optimizer(adamw)?;
    train(&sharded, &mut opt, 0..5)?;
    let model_state = on_all(&group, |to| sharded.fsdp.consolidate_state_dict(to))?;
    let opt_state = on_all(&group, |to| opt.consolidate_state_dict(to))?;
    train(&sharded, &mut opt, 5..10)?;
    let expected = on_all(&group, |to| sharded.fsdp.consolidate_state_dict(to))?;

    // A plain model and optimizer.
    let mut plain = Model::new(7);
    let mut single = adamw((&plain.vs).into_parameters())?;
    plain.vs.load_state_dict(&model_state)?;
    single.as_stateful_mut().context("a state")?.load_state_dict(&opt_state)?;
    same_state(&single.as_stateful().context("a state")?.state_dict()?, &opt_state)?;
    let before = (plain.vs.state_dict()?.copied()?, single.as_stateful().context("a state")?.state_dict()?.copied()?);
    for step in 5..10 {
        step_alone(&plain, &mut *single, &data(step, 0, 0), None)?;
    }
    // Means of equal numbers are these numbers over 2 and 4 ranks.
    same_state(&plain.vs.state_dict()?, &expected)?;

    // Fewer ranks, from the plain run's state.
    if let Some(pair) = group.new_group(&[0, 1])? {
        let mut fewer = Sharded::with(&pair, 3, &[0, 3], |builder| builder)?;
        let mut other: Opt = fewer.fsdp.optimizer(adamw)?;
        fewer.fsdp.load_state_dict(&before.0)?;
        other.load_state_dict(&before.1)?;
        train(&fewer, &mut other, 5..10)?;
        same_state(&on_all(&pair, |to| fewer.fsdp.consolidate_state_dict(to))?, &expected)?;
        refused(&mut fewer.fsdp, &mut other, &model_state, &opt_state)?;
        // Another rank's part.
        let parts = (sharded.fsdp.state_dict()?, opt.state_dict()?);
        ensure!(matches!(fewer.fsdp.load_state_dict(&parts.0), Err(StateError::Mismatch { .. })));
        ensure!(matches!(other.load_state_dict(&parts.1), Err(StateError::Mismatch { .. })));
    }
    ensure!(sharded.fsdp.consolidate_state_dict(9).is_err() && opt.consolidate_state_dict(9).is_err());
    let told = sharded.fsdp.consolidate_state_dict(group.rank());
    ensure!(matches!(told, Err(ShardError::RanksDisagree { .. })), "{told:?}");
    Ok(())
}

/// States that do not fit are refused.
fn refused(
    fsdp: &mut FullyShardedDataParallel,
    opt: &mut Opt,
    model_state: &StateDict,
    opt_state: &StateDict,
) -> Result<()> {
    let mut missing = StateDict::new();
    for (key, entry) in model_state.iter().skip(1) {
        missing.insert(key, entry.share());
    }
    ensure!(matches!(fsdp.load_state_dict(&missing), Err(StateError::Missing { .. })));
    let mut more = model_state.copied()?;
    more.insert("other", overdrive_core::Entry::Int(1));
    ensure!(matches!(fsdp.load_state_dict(&more), Err(StateError::Unexpected { .. })));
    let mut other = opt_state.copied()?;
    let key = opt_state.iter().find(|(key, _)| key.ends_with("exp_avg")).map(|(key, _)| key.to_owned());
    other.insert(key.context("an average")?, overdrive_core::Entry::Tensor(Tensor::ones([2], crate::model::DOUBLE)));
    ensure!(matches!(opt.load_state_dict(&other), Err(StateError::Mismatch { .. })));
    Ok(())
}

/// Uneven rows, fewer rows than ranks, and one row.
const SHAPES: [&[i64]; 6] = [&[12, 10], &[13], &[7, 12], &[2, 2, 3, 3], &[1], &[300, 2]];

/// Every optimizer that steps each element by itself: its steps and state over rows are those over the whole. Not to the
/// bit: kernels compute the last elements of a tensor, which no vector holds, by other instructions.
pub fn optimizers(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let all = element_wise().into_iter().map(|it| (Kind::Double, it));
    let all = all.chain(element_wise_of_bfloat16().into_iter().map(|it| (Kind::BFloat16, it)));
    for (kind, (name, build)) in all {
        equal(&group, kind, build).context(name)?;
    }
    Ok(())
}

fn near(found: &Tensor, expected: &Tensor) -> Result<()> {
    let bound = match expected.kind() {
        Kind::Double => 1e-13,
        Kind::Float => 1e-6,
        // A bit.
        _ => 1.0 / 128.0,
    };
    let (found, expected) = (found.to_kind(Kind::Double), expected.to_kind(Kind::Double));
    ensure!(found.size() == expected.size());
    let off = (&found - &expected).abs().max().double_value(&[]);
    let scale = expected.abs().max().double_value(&[]);
    ensure!(off <= bound * scale, "off by {off} of {scale}");
    Ok(())
}

fn equal(group: &ProcessGroup, kind: Kind, build: Build) -> Result<()> {
    let own = |whole: &Tensor| whole.chunk(group.size() as i64, 0).into_iter().nth(group.rank());
    let whole = parameters(kind, &SHAPES);
    let fsdp = FullyShardedDataParallel::builder(group)?.build(parameters(kind, &SHAPES))?;
    let mut opt: FullyShardedOptimizer<_> = fsdp.optimizer(build)?;
    let mut plain = build(whole.iter().map(Parameter::share).collect())?;
    let step = |number: usize, opt: &mut Opt, plain: &mut dyn Optimizer| -> Result<()> {
        tch::manual_seed(100 + number as i64);
        for (at, (whole, shard)) in whole.iter().zip(fsdp.parameters()).enumerate() {
            let grad = Tensor::randn(whole.tensor().size(), (Kind::Float, Device::Cpu)).to_kind(kind);
            // One has no gradient in the first steps.
            let is_there = at != 2 || number > 1;
            let rows = own(&grad).unwrap_or_else(|| shard.tensor().zeros_like());
            overdrive_ffi::set_grad(whole.tensor(), is_there.then_some(&grad))?;
            overdrive_ffi::set_grad(shard.tensor(), is_there.then_some(&rows.detach()))?;
        }
        opt.step()?;
        plain.step()?;
        for (whole, shard) in whole.iter().zip(fsdp.parameters()) {
            if let Some(rows) = own(whole.tensor()) {
                near(&rows, shard.tensor()).with_context(|| format!("step {number}: {:?}", shard.name()))?;
            }
        }
        Ok(())
    };
    for number in 0..5 {
        step(number, &mut opt, &mut *plain)?;
    }
    let state = plain.as_stateful().context("a state")?.state_dict()?.copied()?;
    if let Some(gathered) = opt.consolidate_state_dict(group.size() - 1)? {
        let (found, expected) = (tensors(&gathered), tensors(&state));
        ensure!(gathered.len() == state.len() && found.len() == expected.len());
        for ((key, found), (other, expected)) in found.iter().zip(&expected) {
            ensure!(key == other && found.kind() == expected.kind(), "{key} for {other}");
            near(found, expected).with_context(|| key.clone())?;
        }
    }
    // The whole's state in place of its own.
    opt.load_state_dict(&state)?;
    plain.as_stateful_mut().context("a state")?.load_state_dict(&state)?;
    step(5, &mut opt, &mut *plain).context("resumed")
}
