//! ZeRO-2 beside one process with the large batch.

use std::sync::{Arc, Mutex};

use anyhow::{Context, Result, ensure};
use overdrive_accum::{Accumulator, Samples};
use overdrive_core::{IntoParameters, Optimizer, Parameter};
use overdrive_ddp::{DistributedDataParallel, ProcessGroup};
use overdrive_ffi::GradHook;
use overdrive_optim::Sgd;
use overdrive_shard::{ShardedDataParallel, ZeroRedundancyOptimizer};
use tch::{Kind, Tensor};

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
    model: fn(i64) -> Model,
    micro_batches: usize,
    adding: Adding,
    max_norm: Option<f64>,
    bucket: usize,
}

const WAY: Way = Way {
    name: "",
    build: sgd,
    model: Model::new,
    micro_batches: 1,
    adding: Adding::Exchanged,
    max_norm: None,
    bucket: 25 << 20,
};

pub fn training(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let ways = [
        Way { name: "SGD with momentum", ..WAY },
        Way { name: "AdamW in two groups", build: adamw, ..WAY },
        Way { name: "AdamW, each gradient sent alone", build: adamw, bucket: 1, ..WAY },
        Way { name: "AdamW in buckets of 1 KiB", build: adamw, bucket: 1 << 10, ..WAY },
        Way { name: "SGD, large gradients", model: Model::large, ..WAY },
        Way { name: "SGD, large gradients, accumulated with exchange", model: Model::large, micro_batches: 2, ..WAY },
        Way {
            name: "SGD, large gradients, accumulator",
            model: Model::large,
            micro_batches: 2,
            adding: Adding::Accumulator,
            ..WAY
        },
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
    let (model, alone) = ((way.model)(1 + rank as i64), (way.model)(1));
    let mut opt = ZeroRedundancyOptimizer::new(&model.vs, group, way.build)?;
    let sharded = ShardedDataParallel::with_bucket_bytes(&mut opt, way.bucket)?;
    let mut single = (way.build)((&alone.vs).into_parameters())?;
    close(&model.values(), &alone.values()).context("after the first broadcast")?;
    // Two numbers have one sum in any order: then steps are those of `DistributedDataParallel` to the bit.
    let is_plain = way.micro_batches == 1 && way.max_norm.is_none() && ranks <= 2;
    let whole = (way.model)(1);
    let ddp = DistributedDataParallel::new(&whole.vs, group)?;
    let mut plain = (way.build)((&whole.vs).into_parameters())?;
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
        if is_plain {
            let batch = data(step, 0, rank);
            let loss = (ddp.forward(|| whole.forward(&batch.0))? - &batch.1).square().mean(Kind::Double);
            ddp.backward(&loss)?;
            plain.step()?;
            plain.zero_grad()?;
            same(&model.values(), &whole.values()).with_context(|| format!("step {step}, beside DDP"))?;
        }
    }
    Ok(())
}

/// A rank has the gradients of the parameters whose state it keeps, and no others.
pub fn only_own_gradients(opt: &ZeroRedundancyOptimizer<Box<dyn Optimizer>>, rank: usize) -> Result<()> {
    for (param, &owner) in opt.parameters().iter().zip(opt.owners()) {
        let is_there = param.tensor().grad().defined();
        ensure!(is_there == (owner == rank), "{:?} of rank {owner}: {is_there}", param.name());
    }
    Ok(())
}

/// When a pass comes to the second layer's input, the other ranks' gradients of the layers after it are freed.
pub fn freed(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    is_freed(&group, sgd).context("one group")?;
    is_freed(&group, adamw).context("two groups: the optimizer has all biases after all weights")
}

fn is_freed(group: &ProcessGroup, build: Build) -> Result<()> {
    let rank = group.rank();
    let model = Model::new(1);
    let mut opt = ZeroRedundancyOptimizer::new(&model.vs, group, build)?;
    let sharded = ShardedDataParallel::with_bucket_bytes(&mut opt, 1)?;
    let targets = data(0, 0, rank).1;
    // The first layer gets no gradient in this pass: nothing waits for it.
    let inputs = Tensor::randn([SAMPLES, 16], DOUBLE).set_requires_grad(true);
    let seen = Arc::new(Mutex::new(Vec::new()));
    let (look, params, owners) = (seen.clone(), opt.parameters(), opt.owners().to_vec());
    let _hook = GradHook::new(&inputs, move || {
        for (param, &owner) in params.iter().zip(&owners).filter(|(_, owner)| **owner != rank) {
            let name = param.name().unwrap_or_default().to_owned();
            look.lock().unwrap().push((name, owner, param.tensor().grad().defined()));
        }
    })?;
    sharded.backward(&(model.forward_from(1, &inputs) - &targets).square().mean(Kind::Double))?;
    let seen = seen.lock().unwrap();
    let later: Vec<_> =
        seen.iter().filter(|(name, ..)| name.starts_with("layer2") || name.starts_with("layer3")).collect();
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
    // H: held; X: exchanged; L: `loss.backward()`; Z: gradients are freed.
    let orders = ["XX", "HX", "XHX", "XHHX", "XZX", "XHZX", "HZX", "XHXHX", "LZX", "XLZX", "LZHX", "XLZHX"];
    for (number, order) in orders.into_iter().enumerate() {
        for (place, letter) in order.chars().enumerate() {
            let step = 10 * number + place;
            if letter == 'Z' {
                opt.zero_grad()?;
                single.zero_grad()?;
                continue;
            }
            mean(step);
            let loss = model.loss(&data(step, 0, rank));
            if letter == 'L' {
                loss.backward();
                continue;
            }
            let _held = (letter == 'H').then(|| sharded.no_sync());
            sharded.backward(&loss)?;
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
