//! ZeRO-2 where something goes wrong, or ranks have to agree.

use anyhow::{Result, ensure};
use overdrive_accum::{Accumulator, Samples};
use overdrive_amp::GradScaler;
use overdrive_core::{GradientSync, IntoParameters, Optimizer, OptimizerError, Parameter};
use overdrive_ddp::{DistributedDataParallel, ProcessGroup};
use overdrive_ffi::GradHook;
use overdrive_optim::{Sgd, clip_grad_norm_};
use overdrive_shard::{ShardError, ShardedDataParallel, ZeroRedundancyOptimizer};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;
use crate::model::{DOUBLE, Model, SAMPLES, close, data, large_batch, same, step_alone};
use crate::sharded::only_own_gradients;
use crate::zero::sgd;

/// What goes wrong on one rank is an error on all, and ranks go on afterwards.
pub fn failures(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let rank = group.rank();
    let model = Model::new(1);
    let mut opt = ZeroRedundancyOptimizer::new(&model.vs, &group, sgd)?;
    let sharded = ShardedDataParallel::new(&mut opt)?;
    let goes_on = |opt: &mut ZeroRedundancyOptimizer<Box<dyn Optimizer>>| -> Result<()> {
        let before = model.values();
        sharded.backward(&model.loss(&data(1, 0, rank)))?;
        only_own_gradients(opt, rank)?;
        opt.step()?;
        opt.zero_grad()?;
        ensure!(same(&model.values(), &before).is_err(), "nothing was stepped");
        Ok(())
    };
    // A loss without a graph on rank 1.
    let loss = if rank == 1 { Tensor::from(1.0) } else { model.loss(&data(0, 0, rank)) };
    let told = sharded.backward(&loss);
    match rank {
        1 => ensure!(matches!(told, Err(ShardError::Torch(_))), "{told:?}"),
        _ => ensure!(matches!(told, Err(ShardError::OtherRank { rank: 1, .. })), "{told:?}"),
    }
    ensure!(opt.params().iter().all(|param| !param.grad().defined()), "gradients are freed");
    goes_on(&mut opt)?;
    // The same in an accumulator.
    let mut accum = Accumulator::new(1)?.with_sync(&sharded);
    let told = accum.backward(&opt, &loss, Samples(SAMPLES), true);
    ensure!(told.is_err(), "{told:?}");
    accum.abandon()?;
    goes_on(&mut opt)?;

    // A step with gradients that were not exchanged.
    let before = model.values();
    model.loss(&data(2, 0, rank)).backward();
    let told = opt.step().expect_err("gradients of this rank alone");
    ensure!(told.to_string().contains("is this rank's alone, not the mean over ranks"), "{told}");
    same(&model.values(), &before)?;
    opt.zero_grad()?;

    // The same after an exchange, which then cannot be told apart from this rank's part; on one rank alone.
    sharded.backward(&model.loss(&data(3, 0, rank)))?;
    if rank == 1 {
        model.loss(&data(4, 0, rank)).backward();
    }
    let told = sharded.backward(&model.loss(&data(5, 0, rank))).expect_err("a stray pass was taken");
    match rank {
        1 => ensure!(told.to_string().contains("`loss.backward()` has added to its gradient"), "{told}"),
        _ => ensure!(matches!(told, ShardError::OtherRank { rank: 1, .. }), "{told:?}"),
    }
    goes_on(&mut opt)?;
    // A pass that leaves gradients local fails on rank 2 alone: the next exchange fails on all.
    let held = sharded.no_sync();
    let loss = if rank == 2 { Tensor::from(1.0) } else { model.loss(&data(6, 0, rank)) };
    ensure!(sharded.backward(&loss).is_err() == (rank == 2));
    drop(held);
    let told = sharded.backward(&model.loss(&data(7, 0, rank))).expect_err("half a window was taken");
    match rank {
        2 => ensure!(told.to_string().contains("has failed since the last exchange"), "{told}"),
        _ => ensure!(matches!(told, ShardError::OtherRank { rank: 2, .. }), "{told:?}"),
    }
    goes_on(&mut opt)?;

    // Others that would average or clip alone.
    let told = clip_grad_norm_(opt.parameters(), 1.0).map(drop);
    let is_refused = matches!(&told, Err(OptimizerError::InvalidParameter { reason, .. })
        if reason.contains("on one rank alone"));
    ensure!(is_refused, "{told:?}");
    ensure!(sharded.clip_grad_norm_(-1.0).is_err() && sharded.clip_grad_norm_(f64::NAN).is_err());
    let told = ShardedDataParallel::new(&mut opt).map(drop);
    ensure!(told.is_err_and(|error| error.to_string().contains("use one of them")));
    let told = Accumulator::new(1)?.backward(&opt, &model.loss(&data(0, 0, rank)), Samples(SAMPLES), true);
    ensure!(told.is_err_and(|error| error.to_string().contains("with_sync")));
    ensure!(GradientSync::world_size(&sharded) == group.size() && sharded.averages(&opt.params()[0]));
    drop(sharded);
    let ddp = DistributedDataParallel::new(&model.vs, &group)?;
    let told = ShardedDataParallel::new(&mut opt).map(drop);
    ensure!(told.is_err_and(|error| error.to_string().contains("`DistributedDataParallel`")));
    drop(ddp);
    // A parameter that is frozen on one rank alone, after the optimizer was built.
    let _frozen = opt.params()[0].set_requires_grad(rank != 2);
    let told = ShardedDataParallel::new(&mut opt).map(drop);
    ensure!(
        matches!(&told, Err(ShardError::RanksDisagree { rank: 2, what, .. }) if what.contains("bucket")),
        "{told:?}"
    );
    let _trained = opt.params()[0].set_requires_grad(true);
    let told = clip_grad_norm_(opt.parameters(), 1.0).map(drop);
    ensure!(told.is_ok(), "{told:?}");
    sparse(&group)
}

/// Windows of which a pass has failed on rank 2.
pub fn windows(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let (rank, ranks) = (group.rank(), group.size());
    let (model, alone) = (Model::new(1), Model::new(1));
    let mut opt = ZeroRedundancyOptimizer::new(&model.vs, &group, sgd)?;
    let sharded = ShardedDataParallel::new(&mut opt)?;
    let mut single = sgd((&alone.vs).into_parameters())?;
    let fails = |on: &[usize]| {
        let _held = sharded.no_sync();
        let loss = if on.contains(&rank) { Tensor::from(1.0) } else { model.loss(&data(0, 0, rank)) };
        ensure!(sharded.backward(&loss).is_err() == on.contains(&rank));
        Ok(())
    };
    // Begun anew on all ranks.
    fails(&[2])?;
    opt.zero_grad()?;
    {
        let _held = sharded.no_sync();
        sharded.backward(&(model.loss(&data(1, 0, rank)) / 2.0))?;
    }
    sharded.backward(&(model.loss(&data(1, 1, rank)) / 2.0))?;
    opt.step()?;
    opt.zero_grad()?;
    step_alone(&alone, &mut *single, &large_batch(1, 2, ranks), None)?;
    close(&model.values(), &alone.values())?;
    // On rank 2 alone: the others have the first pass in their gradients.
    fails(&[2])?;
    if rank == 2 {
        opt.zero_grad()?;
    }
    let told = sharded.backward(&model.loss(&data(2, 0, rank)));
    ensure!(matches!(&told, Err(ShardError::RanksDisagree { rank: 2, .. })), "{told:?}");
    ensure!(opt.params().iter().all(|param| !param.grad().defined()), "gradients are freed");
    // A mean that waits for more passes is no mean to step with.
    sharded.backward(&model.loss(&data(3, 0, rank)))?;
    fails(&[0, 1, 2])?;
    let told = opt.step().expect_err("half a window was taken");
    ensure!(told.to_string().contains("have left gradients local"), "{told}");
    close(&model.values(), &alone.values())?;
    opt.zero_grad()?;
    sharded.backward(&model.loss(&data(3, 0, rank)))?;
    opt.step()?;
    step_alone(&alone, &mut *single, &large_batch(3, 1, ranks), None)?;
    close(&model.values(), &alone.values())
}

/// A sparse gradient on the last rank.
fn sparse(group: &ProcessGroup) -> Result<()> {
    let last = group.rank() + 1 == group.size();
    let table = Tensor::ones([6, 2], DOUBLE).set_requires_grad(true);
    let build = |params: Vec<Parameter>| Sgd::builder(params).lr(1.0).build();
    let params = vec![Parameter::named("table", table.shallow_clone())];
    let mut opt = ZeroRedundancyOptimizer::new(params, group, build)?;
    let sharded = ShardedDataParallel::new(&mut opt)?;
    let loss =
        |sparse: bool| Tensor::embedding(&table, &Tensor::from_slice(&[1i64, 3]), -1, false, sparse).sum(Kind::Double);
    let told = sharded.backward(&loss(last));
    match last {
        true => ensure!(
            matches!(&told, Err(ShardError::Optimizer(OptimizerError::InvalidParameter { parameter, .. }))
                if parameter == "`table`"),
            "{told:?}"
        ),
        false => ensure!(
            matches!(&told, Err(ShardError::OtherRank { reason, .. }) if reason.contains("`table`")),
            "{told:?}"
        ),
    }
    sharded.backward(&loss(false))?;
    opt.step()?;
    ensure!(table.detach().sum(Kind::Double).double_value(&[]) == 8.0, "{table}");
    Ok(())
}

/// A backward pass within the pass, on the first rank: its gradient comes after the first one may have been sent.
pub fn twice(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let param = Tensor::ones([3], DOUBLE).set_requires_grad(true);
    let build = |params: Vec<Parameter>| Sgd::builder(params).lr(1.0).build();
    let params = vec![Parameter::named("param", param.shallow_clone())];
    let mut opt = ZeroRedundancyOptimizer::new(params, &group, build)?;
    let sharded = ShardedDataParallel::new(&mut opt)?;
    let inputs = Tensor::ones([3], DOUBLE).set_requires_grad(true);
    let (again, is_first) = (param.shallow_clone(), group.rank() == 0);
    let hook = GradHook::new(&inputs, move || {
        if is_first {
            tch::with_grad(|| again.sum(Kind::Double).backward());
        }
    })?;
    let told = sharded.backward(&(&inputs * &param).sum(Kind::Double));
    match is_first {
        true => ensure!(
            matches!(&told, Err(ShardError::Optimizer(OptimizerError::InvalidParameter { parameter, reason }))
                if parameter == "`param`" && reason.contains("twice in one backward pass")),
            "{told:?}"
        ),
        false => ensure!(matches!(told, Err(ShardError::OtherRank { rank: 0, .. })), "{told:?}"),
    }
    drop(hook);
    sharded.backward(&(&inputs * &param).sum(Kind::Double))?;
    opt.step()?;
    ensure!(param.detach() == Tensor::zeros([3], DOUBLE), "{param}");
    Ok(())
}

/// An infinity of one rank's loss: all ranks skip the step, and lower the scale, whichever rank has the gradient.
pub fn scaler(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let rank = group.rank();
    let model = Model::new(1);
    let mut opt = ZeroRedundancyOptimizer::new(&model.vs, &group, sgd)?;
    let sharded = ShardedDataParallel::new(&mut opt)?;
    let mut scaler = GradScaler::builder(Device::Cpu).init_scale(64.0).build()?;
    for step in 0..4 {
        let before = model.values();
        let is_bad = step % 2 == 1;
        // Only one parameter, and so one owner, has an infinite gradient.
        let bias = model.vs.variables()["layer3.bias"].shallow_clone();
        let extra = if is_bad && rank == step % group.size() { f64::INFINITY } else { 0.0 };
        let loss = model.loss(&data(step, 0, rank)) + bias.sum(Kind::Double) * extra;
        sharded.backward(&scaler.scale(&loss)?)?;
        scaler.unscale_(&mut opt)?;
        sharded.clip_grad_norm_(1.0)?;
        let skipped = scaler.step(&mut opt)?.skipped()?;
        scaler.update()?;
        opt.zero_grad()?;
        ensure!(skipped == is_bad && same(&model.values(), &before).is_ok() == is_bad, "step {step}: {skipped}");
        let scales = group.all_gather_object(&scaler.scale_value()?)?;
        ensure!(scales.iter().all(|scale| *scale == scales[0]) && scales[0] == [64.0, 32.0, 32.0, 16.0][step]);
    }
    Ok(())
}
