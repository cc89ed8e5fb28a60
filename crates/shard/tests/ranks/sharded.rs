//! ZeRO-2 beside one process with the large batch.

use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, ensure};
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
use crate::zero::{Build, adamw, sgd};

const STEPS: usize = 50;

/// How gradients of several micro-batches are added up.
#[derive(Clone, Copy, PartialEq)]
enum Adding {
    /// Each pass averages.
    Exchanged,
    /// By `no_sync`; the last pass averages.
    Held,
    /// By an `Accumulator`.
    Accumulator,
}

struct Way {
    name: &'static str,
    build: Build,
    micro_batches: usize,
    adding: Adding,
    max_norm: Option<f64>,
    bucket: usize,
}

const WAY: Way =
    Way { name: "", build: sgd, micro_batches: 1, adding: Adding::Exchanged, max_norm: None, bucket: 25 << 20 };

pub fn training(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let ways = [
        Way { name: "SGD with momentum", ..WAY },
        Way { name: "AdamW in two groups", build: adamw, ..WAY },
        Way { name: "AdamW, each gradient sent alone", build: adamw, bucket: 1, ..WAY },
        Way { name: "AdamW in buckets of 1 KiB", build: adamw, bucket: 1 << 10, ..WAY },
        Way { name: "SGD, accumulated with exchange", micro_batches: 3, bucket: 1 << 10, ..WAY },
        Way { name: "SGD, accumulated without exchange", micro_batches: 3, adding: Adding::Held, ..WAY },
        Way { name: "AdamW, accumulator", build: adamw, micro_batches: 3, adding: Adding::Accumulator, ..WAY },
        Way { name: "AdamW, clipped", build: adamw, max_norm: Some(0.5), ..WAY },
        Way {
            name: "AdamW, accumulated and clipped",
            build: adamw,
            micro_batches: 2,
            adding: Adding::Accumulator,
            max_norm: Some(0.5),
            ..WAY
        },
    ];
    for way in ways {
        trains(&group, &way).with_context(|| format!("{}, {} ranks", way.name, group.size()))?;
    }
    Ok(())
}

fn trains(group: &ProcessGroup, way: &Way) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.size());
    // Every rank starts with other values, and gets rank 0's.
    let (model, alone) = (Model::new(1 + rank as i64), Model::new(1));
    let mut opt = ZeroRedundancyOptimizer::new(&model.vs, group, way.build)?;
    let sharded = ShardedDataParallel::with_bucket_bytes(&mut opt, way.bucket)?;
    let mut single = (way.build)((&alone.vs).into_parameters())?;
    close(&model.values(), &alone.values()).context("after the first broadcast")?;
    for step in 0..STEPS {
        let mut accum = Accumulator::new(way.micro_batches)?.with_sync(&sharded);
        for micro in 0..way.micro_batches {
            let closes = micro + 1 == way.micro_batches;
            let loss = model.loss(&data(step, micro, rank));
            if way.adding == Adding::Accumulator {
                accum.backward(&opt, &loss, Samples(SAMPLES), closes)?;
                continue;
            }
            let _held = (way.adding == Adding::Held && !closes).then(|| sharded.no_sync());
            sharded.backward(&(loss / way.micro_batches as f64))?;
        }
        only_own_gradients(&opt, rank)?;
        if let Some(max_norm) = way.max_norm {
            let norm = sharded.clip_grad_norm_(max_norm)?.double_value(&[]);
            let norms = group.all_gather_object(&norm)?;
            ensure!(norms.iter().all(|it| *it == norm) && norm > 0.0, "{norms:?}");
        }
        opt.step()?;
        opt.zero_grad()?;
        step_alone(&alone, &mut *single, &large_batch(step, way.micro_batches, ranks), way.max_norm)?;
        close(&model.values(), &alone.values()).with_context(|| format!("step {step}"))?;
    }
    Ok(())
}

/// A rank has the gradients of the parameters whose state it keeps, and no others.
fn only_own_gradients(opt: &ZeroRedundancyOptimizer<Box<dyn Optimizer>>, rank: usize) -> Result<()> {
    for (param, &owner) in opt.parameters().iter().zip(opt.owners()) {
        let is_there = param.tensor().grad().defined();
        ensure!(is_there == (owner == rank), "{:?} of rank {owner}: {is_there}", param.name());
    }
    Ok(())
}

/// When a pass comes to the model's input, the other ranks' gradients of the later layers are freed.
pub fn freed(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let rank = group.rank();
    let model = Model::new(1);
    let mut opt = ZeroRedundancyOptimizer::new(&model.vs, &group, sgd)?;
    let sharded = ShardedDataParallel::with_bucket_bytes(&mut opt, 1)?;
    let (inputs, targets) = data(0, 0, rank);
    let inputs = inputs.set_requires_grad(true);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (look, params, owners) = (seen.clone(), opt.parameters(), opt.owners().to_vec());
    let _hook = GradHook::new(&inputs, move || {
        for (param, &owner) in params.iter().zip(&owners).filter(|(_, owner)| **owner != rank) {
            let name = param.name().unwrap_or_default().to_owned();
            look.lock().unwrap().push((name, owner, param.tensor().grad().defined()));
        }
    })?;
    sharded.backward(&(model.forward(&inputs) - &targets).square().mean(Kind::Double))?;
    let seen = seen.lock().unwrap();
    let later: Vec<_> = seen.iter().filter(|(name, ..)| !name.starts_with("layer0")).collect();
    ensure!(!later.is_empty() && later.iter().all(|(.., is_there)| !is_there), "{seen:?}");
    Ok(())
}

/// Passes with and without exchange in any order, freed gradients between, and a window that closes with nothing.
pub fn passes(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let (rank, ranks) = (group.rank(), group.size());
    let (model, alone) = (Model::new(1), Model::new(1));
    let mut opt = ZeroRedundancyOptimizer::new(&model.vs, &group, sgd)?;
    let sharded = ShardedDataParallel::with_bucket_bytes(&mut opt, 1 << 10)?;
    let mut single = sgd((&alone.vs).into_parameters())?;
    let mean = |step: usize| alone.loss(&large_batch(step, 1, ranks)).backward();
    let own_equal = |opt: &ZeroRedundancyOptimizer<Box<dyn Optimizer>>| -> Result<()> {
        let expected = alone.vs.variables();
        for (param, _) in opt.parameters().iter().zip(opt.owners()).filter(|(_, owner)| **owner == rank) {
            let name = param.name().context("a name")?;
            let pair = |tensor: Tensor| vec![(name.to_owned(), tensor)];
            close(&pair(param.tensor().grad()), &pair(expected[name].grad()))?;
        }
        only_own_gradients(opt, rank)
    };
    // H: held; X: exchanged; Z: gradients are freed.
    for (number, order) in ["XX", "HX", "XHX", "XHHX", "XZX", "XHZX", "HZX", "XHXHX"].into_iter().enumerate() {
        for (place, letter) in order.chars().enumerate() {
            let step = 10 * number + place;
            if letter == 'Z' {
                opt.zero_grad()?;
                single.zero_grad()?;
                continue;
            }
            let _held = (letter == 'H').then(|| sharded.no_sync());
            sharded.backward(&model.loss(&data(step, 0, rank)))?;
            mean(step);
        }
        own_equal(&opt).context(order)?;
        opt.zero_grad()?;
        single.zero_grad()?;
    }
    // The last micro-batch of the last rank counts nothing: its loss is NaN.
    let mut accum = Accumulator::new(2)?.with_sync(&sharded);
    let last = rank + 1 == ranks;
    accum.backward(&opt, &model.loss(&data(90, 0, rank)), Samples(SAMPLES), false)?;
    let (loss, count) = match last {
        true => (Tensor::from(f64::NAN), 0),
        false => (model.loss(&data(90, 1, rank)), SAMPLES),
    };
    accum.backward(&opt, &loss, Samples(count), true)?;
    let parts: Vec<_> = (0..2 * ranks - 1).map(|at| data(90, at / ranks, at % ranks)).collect();
    let (inputs, targets): (Vec<_>, Vec<_>) = parts.into_iter().unzip();
    alone.loss(&(Tensor::cat(&inputs, 0), Tensor::cat(&targets, 0))).backward();
    own_equal(&opt).context("a window that closes with nothing")
}

/// Parameters that some ranks or all leave out, and frozen ones.
pub fn unused(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let rank = group.rank();
    let ones = || Tensor::ones([4], DOUBLE).set_requires_grad(true);
    let (always, by_rank_1, never) = (ones(), ones(), ones());
    let frozen = Tensor::ones([4], DOUBLE);
    let build = |params: Vec<Parameter>| Sgd::builder(params).lr(1.0).weight_decay(0.5).build();
    let mut opt = ZeroRedundancyOptimizer::new([&always, &by_rank_1, &never, &frozen], &group, build)?;
    let sharded = ShardedDataParallel::with_bucket_bytes(&mut opt, 1)?;
    let loss_of = |both: bool| match both {
        true => (&always + &by_rank_1).sum(Kind::Double),
        false => always.sum(Kind::Double),
    };
    sharded.backward(&loss_of(rank == 1))?;
    opt.step()?;
    opt.zero_grad()?;
    let value = |tensor: &Tensor| tensor.detach().double_value(&[3]);
    let mean = 1.0 / group.size() as f64;
    let found = [&always, &by_rank_1, &never, &frozen].map(value);
    // A parameter without a gradient is not decayed.
    ensure!(found == [1.0 - (1.0 + 0.5), 1.0 - mean - 0.5, 1.0, 1.0], "{found:?}");
    // What an earlier pass has left stays.
    sharded.backward(&loss_of(rank == 1))?;
    sharded.backward(&loss_of(false))?;
    let of_rank_1 = by_rank_1.grad();
    ensure!(of_rank_1.defined() == (opt.owners()[1] == rank) && !never.grad().defined());
    ensure!(!of_rank_1.defined() || of_rank_1.double_value(&[0]) == mean, "{of_rank_1}");
    opt.zero_grad()?;
    // Unfrozen later: it is not averaged, and the step says so.
    let frozen = frozen.set_requires_grad(true);
    sharded.backward(&(&always + &frozen).sum(Kind::Double))?;
    let told = opt.step().expect_err("a gradient that is not averaged");
    ensure!(told.to_string().contains("not averaged over the ranks"), "{told}");
    Ok(())
}

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
    let told = clip_grad_norm_(opt.parameters(), 1.0).map(drop);
    ensure!(told.is_ok(), "{told:?}");
    sparse(&group)
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
