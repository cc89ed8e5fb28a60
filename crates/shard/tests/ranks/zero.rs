//! ZeRO-1 beside one process with the large batch, and beside `DistributedDataParallel` with the whole state.

use anyhow::{Context, Result, ensure};
use overdrive_accum::{Accumulator, Samples};
use overdrive_core::{IntoParameters, Optimizer, OptimizerError, Parameter, StateDict};
use overdrive_ddp::{DistributedDataParallel, ProcessGroup};
use overdrive_optim::{AdamW, Lion, Lookahead, Sgd, clip_grad_norm_, hidden_matrices};
use overdrive_shard::ZeroRedundancyOptimizer;
use tch::{Kind, Tensor};

use crate::harness::Meeting;
use crate::model::{DOUBLE, Model, SAMPLES, bytes, close, data, large_batch, same, same_state, step_alone};

const STEPS: usize = 50;

pub type Build = fn(Vec<Parameter>) -> Result<Box<dyn Optimizer>, OptimizerError>;

pub fn sgd(params: Vec<Parameter>) -> Result<Box<dyn Optimizer>, OptimizerError> {
    Ok(Box::new(Sgd::builder(params).lr(0.05).momentum(0.9).weight_decay(1e-3).build()?))
}

/// Two groups: biases have no weight decay.
pub fn adamw(params: Vec<Parameter>) -> Result<Box<dyn Optimizer>, OptimizerError> {
    Ok(Box::new(AdamW::builder(params).lr(0.01).weight_decay(0.1).decay_groups().build()?))
}

fn lookahead(params: Vec<Parameter>) -> Result<Box<dyn Optimizer>, OptimizerError> {
    Ok(Box::new(Lookahead::new(Lion::builder(params).lr(1e-3).build()?, 5, 0.5)?))
}

/// A way to train.
struct Way {
    name: &'static str,
    build: Build,
    model: fn(i64) -> Model,
    micro_batches: usize,
    max_norm: Option<f64>,
    /// Bytes of a broadcast.
    bucket: usize,
}

const WAY: Way = Way { name: "", build: sgd, model: Model::new, micro_batches: 1, max_norm: None, bucket: 25 << 20 };

/// 50 steps of each way are those of one process; and to the bit those of `DistributedDataParallel` with the whole
/// optimizer on each rank.
pub fn training(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let ways = [
        Way { name: "SGD with momentum", ..WAY },
        Way { name: "AdamW in two groups", build: adamw, ..WAY },
        Way { name: "AdamW, each parameter sent alone", build: adamw, bucket: 1, ..WAY },
        Way { name: "AdamW in buckets of 1 KiB", build: adamw, bucket: 1 << 10, ..WAY },
        Way { name: "AdamW, large parameters", build: adamw, model: Model::large, ..WAY },
        Way { name: "SGD, accumulated", micro_batches: 3, ..WAY },
        Way { name: "AdamW, clipped", build: adamw, max_norm: Some(0.5), ..WAY },
        Way { name: "AdamW, accumulated and clipped", build: adamw, micro_batches: 2, max_norm: Some(0.5), ..WAY },
        Way { name: "Lookahead", build: lookahead, ..WAY },
    ];
    for way in ways {
        trains(&group, &way).with_context(|| format!("{}, {} ranks", way.name, group.size()))?;
    }
    Ok(())
}

fn trains(group: &ProcessGroup, way: &Way) -> Result<()> {
    let (rank, ranks) = (group.rank(), group.size());
    let sharded = (way.model)(1 + rank as i64); // `DistributedDataParallel` gives all rank 0's values
    let whole = (way.model)(1);
    let alone = (way.model)(1);
    let ddp = DistributedDataParallel::new(&sharded.vs, group)?;
    let whole_ddp = DistributedDataParallel::new(&whole.vs, group)?;
    let mut zero = ZeroRedundancyOptimizer::new(&sharded.vs, group, way.build)?.bucket_bytes(way.bucket)?;
    let mut plain = (way.build)((&whole.vs).into_parameters())?;
    let mut single = (way.build)((&alone.vs).into_parameters())?;
    for step in 0..STEPS {
        // As a schedule does.
        for number in 0..zero.num_groups() {
            let lr = single.lr(number).context("a rate")? * 0.99;
            zero.set_lr(number, lr)?;
            plain.set_lr(number, lr)?;
            single.set_lr(number, lr)?;
            ensure!(zero.lr(number) == Some(lr));
        }
        step_over_ranks(way, &sharded, &ddp, &mut zero, step)?;
        step_over_ranks(way, &whole, &whole_ddp, &mut plain, step)?;
        step_alone(&alone, &mut *single, &large_batch(step, way.micro_batches, ranks), way.max_norm)?;
        close(&sharded.values(), &alone.values()).with_context(|| format!("step {step}, beside one process"))?;
        same(&sharded.values(), &whole.values()).with_context(|| format!("step {step}, beside the whole state"))?;
    }
    Ok(())
}

fn step_over_ranks(
    way: &Way,
    model: &Model,
    ddp: &DistributedDataParallel,
    opt: &mut dyn Optimizer,
    step: usize,
) -> Result<()> {
    let rank = ddp.group().rank();
    if way.micro_batches == 1 {
        let batch = data(step, 0, rank);
        let loss = (ddp.forward(|| model.forward(&batch.0))? - &batch.1).square().mean(Kind::Double);
        ddp.backward(&loss)?;
    } else {
        let mut accum = Accumulator::new(way.micro_batches)?.with_sync(ddp);
        for micro in 0..way.micro_batches {
            let batch = data(step, micro, rank);
            let loss = (ddp.forward(|| model.forward(&batch.0))? - &batch.1).square().mean(Kind::Double);
            accum.backward(opt, &loss, Samples(SAMPLES), micro + 1 == way.micro_batches)?;
        }
    }
    if let Some(max_norm) = way.max_norm {
        clip_grad_norm_(opt.parameters(), max_norm)?;
    }
    opt.step()?;
    Ok(opt.zero_grad()?)
}

/// A rank's tensors of state are about 1/N of those of the whole optimizer, and all ranks' together are exactly those.
pub fn memory(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let layer = |size: i64| [Tensor::ones([size, size], DOUBLE), Tensor::ones([size], DOUBLE)];
    let layers = || (20..36).flat_map(layer).map(|it| it.set_requires_grad(true)).collect::<Vec<_>>();
    let state = |opt: &mut dyn Optimizer| -> Result<usize> {
        opt.params().iter().for_each(|param| param.square().sum(Kind::Double).backward());
        opt.step()?;
        Ok(bytes(&opt.as_stateful().context("a state")?.state_dict()?))
    };
    let own = state(&mut ZeroRedundancyOptimizer::new(layers(), &group, adamw)?)?;
    let whole = state(&mut *adamw(layers().into_parameters())?)?;
    let all = group.all_gather_object(&own)?;
    ensure!(all.iter().sum::<usize>() == whole, "{all:?} of {whole}");
    let share = whole / group.size();
    ensure!(all.iter().all(|own| own.abs_diff(share) < share / 10), "{all:?}, a share is {share}");
    Ok(())
}

/// More ranks than parameters: some ranks have none, and take part.
pub fn few_parameters(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let matrices = |model: &Model| {
        let all = (&model.vs).into_parameters();
        hidden_matrices(all, |name| name.contains("layer2") || name.contains("layer3")).0
    };
    let (model, alone) = (Model::new(1), Model::new(1));
    let ddp = DistributedDataParallel::new(&model.vs, &group)?;
    let mut zero = ZeroRedundancyOptimizer::new(matrices(&model), &group, adamw)?;
    let mut single = adamw(matrices(&alone))?;
    let have = group.all_gather_object(&zero.inner().is_some())?;
    ensure!(have == [true, true, false, false], "{have:?}");
    for step in 0..5 {
        step_over_ranks(&WAY, &model, &ddp, &mut zero, step)?;
        step_alone(&alone, &mut *single, &large_batch(step, 1, group.size()), None)?;
        close(&model.values(), &alone.values())?;
        model.vs.variables().values().for_each(|it| it.shallow_clone().zero_grad());
        alone.vs.variables().values().for_each(|it| it.shallow_clone().zero_grad());
    }
    // Gathered on a rank that has no part of it.
    let (whole, expected) = (zero.consolidate_state_dict(3)?, single.as_stateful().context("a state")?.state_dict()?);
    ensure!(whole.is_some() == (group.rank() == 3));
    let keys = |state: &StateDict| state.iter().map(|(key, _)| key.to_owned()).collect::<Vec<_>>();
    ensure!(whole.is_none_or(|whole| keys(&whole) == keys(&expected)));
    Ok(())
}

/// A run that is resumed from each rank's part, or from the whole state, goes on to the bit.
pub fn resume(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let (model, resumed, from_whole) = (Model::new(1), Model::new(2), Model::new(3));
    let train = |model: &Model, opt: &mut dyn Optimizer, steps: std::ops::Range<usize>| -> Result<()> {
        steps.into_iter().try_for_each(|step| step_alone(model, opt, &data(step, 0, 0), None))
    };
    let mut opt = ZeroRedundancyOptimizer::new(&model.vs, &group, adamw)?;
    train(&model, &mut opt, 0..5)?;
    opt.set_lr(1, 0.004)?;
    let stateful = |opt: &ZeroRedundancyOptimizer<Box<dyn Optimizer>>| {
        Ok::<_, anyhow::Error>(opt.as_stateful().context("a state")?.state_dict()?.copied()?)
    };
    let (part, values) = (stateful(&opt)?, model.values());
    let whole = whole_on_all(&group, &opt)?;
    train(&model, &mut opt, 5..10)?;

    let put = |model: &Model| {
        let _no_grad = tch::no_grad_guard();
        let variables = model.vs.variables();
        values.iter().for_each(|(name, value)| variables[name].shallow_clone().copy_(value));
    };
    put(&resumed);
    let mut other = ZeroRedundancyOptimizer::new(&resumed.vs, &group, adamw)?;
    other.as_stateful_mut().context("a state")?.load_state_dict(&part)?;
    ensure!(other.lr(1) == Some(0.004), "the rate of a group, also where the rank has none of it");
    same_state(&stateful(&other)?, &part)?;
    train(&resumed, &mut other, 5..10)?;
    same(&resumed.values(), &model.values()).context("resumed from a part")?;
    same_state(&stateful(&other)?, &stateful(&opt)?)?;

    // Over a group of another size, and by the optimizer alone.
    let pair = group.new_group(&[0, 1])?;
    if let Some(pair) = pair {
        put(&from_whole);
        let mut other = ZeroRedundancyOptimizer::new(&from_whole.vs, &pair, adamw)?;
        other.as_stateful_mut().context("a state")?.load_state_dict(&whole)?;
        train(&from_whole, &mut other, 5..10)?;
        same(&from_whole.values(), &model.values()).context("resumed over 2 ranks")?;
    }
    let alone = Model::new(4);
    put(&alone);
    let mut single = adamw((&alone.vs).into_parameters())?;
    single.as_stateful_mut().context("a state")?.load_state_dict(&whole)?;
    same_state(&single.as_stateful().context("a state")?.state_dict()?, &whole)?;
    train(&alone, &mut *single, 5..10)?;
    same(&alone.values(), &model.values()).context("resumed by the optimizer alone")
}

/// The whole state, on every rank.
fn whole_on_all(group: &ProcessGroup, opt: &ZeroRedundancyOptimizer<Box<dyn Optimizer>>) -> Result<StateDict> {
    let mut own = None;
    for to in 0..group.size() {
        let whole = opt.consolidate_state_dict(to)?;
        ensure!(whole.is_some() == (group.rank() == to));
        own = whole.or(own);
    }
    own.context("no whole state")
}
