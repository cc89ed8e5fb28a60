//! Parameters of unusual sizes and dtypes, and ranks without parameters.

use anyhow::{Context, Result, ensure};
use overdrive_amp::GradScaler;
use overdrive_core::{IntoParameters, Optimizer, Parameter, Stateful};
use overdrive_ddp::ProcessGroup;
use overdrive_optim::{AdamW, Sgd, clip_grad_norm_};
use overdrive_shard::{ShardedDataParallel, ZeroRedundancyOptimizer};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;
use crate::model::{DOUBLE, Model, close, data, large_batch, same, step_alone};
use crate::zero::adamw;

fn sgd(params: Vec<Parameter>) -> Result<Sgd, overdrive_core::OptimizerError> {
    Sgd::builder(params).lr(0.5).build()
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    scaled(&group).context("a scaler, with ranks that have no gradients")?;
    shapes(&group).context("empty parameters and numbers")?;
    for kind in [Kind::Half, Kind::BFloat16] {
        norms(&group, kind).with_context(|| format!("{kind:?}"))?;
    }
    infinities(&group)?;
    layouts(&group)?;
    other_order(&group).context("a state of another order")
}

/// Two parameters over four ranks: the others have no gradients to unscale, clip or look for infinities in.
fn scaled(group: &ProcessGroup) -> Result<()> {
    let params = [3i64, 2].map(|size| Tensor::ones([size], DOUBLE).set_requires_grad(true));
    let mut opt = ZeroRedundancyOptimizer::new(&params, group, sgd)?;
    let sharded = ShardedDataParallel::new(&mut opt)?;
    let mut scaler = GradScaler::builder(Device::Cpu).init_scale(8.0).build()?;
    for is_bad in [true, false] {
        let factor = if is_bad && group.rank() == 3 { f64::INFINITY } else { 1.0 };
        let loss = (params[0].sum(Kind::Double) + params[1].sum(Kind::Double)) * factor;
        sharded.backward(&scaler.scale(&loss)?)?;
        scaler.unscale_(&mut opt)?;
        let norm = sharded.clip_grad_norm_(100.0)?.double_value(&[]);
        ensure!(is_bad || (norm - 5f64.sqrt()).abs() < 1e-12, "{norm}");
        ensure!(scaler.step(&mut opt)?.skipped()? == is_bad);
        scaler.update()?;
        opt.zero_grad()?;
    }
    ensure!(scaler.scale_value()? == 4.0 && params[0].double_value(&[0]) == 0.5);
    // Unscaled gradients that a failed pass has freed: those of the next one are scaled again.
    sharded.backward(&scaler.scale(&params[0].sum(Kind::Double))?)?;
    scaler.unscale_(&mut opt)?;
    ensure!(sharded.backward(&Tensor::from(1.0)).is_err());
    sharded.backward(&scaler.scale(&params[0].sum(Kind::Double))?)?;
    ensure!(!scaler.step(&mut opt)?.skipped()?);
    ensure!(params[0].double_value(&[0]) == 0.0, "{}", params[0]);
    Ok(())
}

fn shapes(group: &ProcessGroup) -> Result<()> {
    let shapes: [&[i64]; 3] = [&[0], &[], &[2, 0, 3]];
    let params = shapes.map(|shape| Tensor::ones(shape, DOUBLE).set_requires_grad(true));
    let mut opt = ZeroRedundancyOptimizer::new(&params, group, sgd)?;
    let sharded = ShardedDataParallel::with_bucket_bytes(&mut opt, 1)?;
    let sum = params.iter().fold(Tensor::from(0.0), |sum, param| sum + param.sum(Kind::Double));
    sharded.backward(&sum)?;
    ensure!(sharded.clip_grad_norm_(10.0)?.double_value(&[]) == 1.0);
    opt.step()?;
    ensure!(params[1].double_value(&[]) == 0.5);
    Ok(())
}

/// A norm of 16-bit gradients that 16 bits cannot hold.
fn norms(group: &ProcessGroup, kind: Kind) -> Result<()> {
    let param = Tensor::zeros([1 << 16], (kind, Device::Cpu)).set_requires_grad(true);
    let mut opt = ZeroRedundancyOptimizer::new([&param], group, sgd)?;
    let sharded = ShardedDataParallel::new(&mut opt)?;
    sharded.backward(&(&param * 516.0).sum(Kind::Float))?;
    let norm = sharded.clip_grad_norm_(258.0)?.double_value(&[]);
    ensure!((norm / (516.0 * 256.0) - 1.0).abs() < 1e-4, "{norm}");
    opt.step()?;
    let found = param.double_value(&[7]);
    ensure!((found + 0.5 * 258.0 / 256.0).abs() < 1e-2, "{found}");
    Ok(())
}

/// The gradients beside those of one process, where the norm or its limit is not finite.
fn infinities(group: &ProcessGroup) -> Result<()> {
    for (scale, max_norm) in [(1.0, f64::INFINITY), (f64::INFINITY, 1.0), (f64::NAN, 1.0), (0.0, 1.0), (1.0, 0.0)] {
        let params = || [3i64, 2].map(|size| Tensor::ones([size], DOUBLE).set_requires_grad(true));
        let (sharded_params, alone) = (params(), params());
        let loss = |params: &[Tensor]| params[0].sum(Kind::Double) * scale + params[1].sum(Kind::Double);
        let mut opt = ZeroRedundancyOptimizer::new(&sharded_params, group, sgd)?;
        let sharded = ShardedDataParallel::new(&mut opt)?;
        sharded.backward(&loss(&sharded_params))?;
        loss(&alone).backward();
        let norm = sharded.clip_grad_norm_(max_norm)?.double_value(&[]);
        let expected = clip_grad_norm_(&alone, max_norm)?.double_value(&[]);
        ensure!(norm == expected || (norm.is_nan() && expected.is_nan()), "{norm}, {expected}");
        for ((one, other), &owner) in sharded_params.iter().zip(&alone).zip(opt.owners()) {
            let is_same = owner != group.rank() || one.grad().allclose(&other.grad(), 1e-12, 0.0, true);
            ensure!(is_same, "{scale}, {max_norm}: {}, {}", one.grad(), other.grad());
        }
    }
    Ok(())
}

/// Parameters that are not contiguous, one that is used twice, and one that is frozen later on.
fn layouts(group: &ProcessGroup) -> Result<()> {
    let params = || {
        tch::manual_seed(1);
        let random = |shape: &[i64]| Tensor::randn(shape, DOUBLE);
        let last = random(&[2, 4, 5, 3]).permute([0, 3, 1, 2]);
        let all = [random(&[4, 6]).transpose(0, 1), last, random(&[5]), random(&[5])];
        all.map(|it| it.detach().set_requires_grad(true))
    };
    let loss = |[table, last, twice, later]: &[Tensor; 4], rank: usize| {
        tch::manual_seed(10 + rank as i64);
        let random = |like: &Tensor| like.randn_like();
        let sums = [table * random(table), last * random(last), twice * random(twice) * twice, later * random(later)];
        sums.iter().fold(Tensor::from(0.0), |sum, it| sum + it.sum(Kind::Double))
    };
    let build = |params: Vec<Parameter>| AdamW::builder(params).lr(0.1).weight_decay(0.1).build();
    let (sharded_params, alone) = (params(), params());
    let mut opt = ZeroRedundancyOptimizer::new(&sharded_params, group, build)?;
    let sharded = ShardedDataParallel::with_bucket_bytes(&mut opt, 400)?;
    let mut single = build((&alone).into_parameters())?;
    for step in 0..4 {
        if step == 2 {
            let _frozen = [&sharded_params, &alone].map(|params| params[3].set_requires_grad(false));
        }
        sharded.backward(&loss(&sharded_params, group.rank()))?;
        opt.step()?;
        opt.zero_grad()?;
        let all = (0..group.size()).map(|rank| loss(&alone, rank) / group.size() as f64);
        all.fold(Tensor::from(0.0), |sum, it| sum + it).backward();
        single.step()?;
        single.zero_grad()?;
        for (number, (one, other)) in sharded_params.iter().zip(&alone).enumerate() {
            ensure!(one.allclose(other, 1e-11, 1e-12, false), "step {step}: parameter {number}");
        }
    }
    Ok(())
}

/// A whole state whose parameters were in another order, and over another number of ranks.
fn other_order(group: &ProcessGroup) -> Result<()> {
    let (model, alone) = (Model::new(1), Model::new(1));
    let mut single = adamw((&alone.vs).into_parameters())?;
    step_alone(&alone, &mut *single, &data(0, 0, 0), None)?;
    let state = single.as_stateful().context("a state")?.state_dict()?.copied()?;
    let reversed: Vec<Parameter> = (&model.vs).into_parameters().into_iter().rev().collect();
    let mut opt = ZeroRedundancyOptimizer::new(reversed, group, adamw)?;
    opt.load_state_dict(&state)?;
    tch::no_grad(|| {
        let variables = model.vs.variables();
        alone.values().iter().for_each(|(name, value)| variables[name].shallow_clone().copy_(value));
    });
    let sharded = ShardedDataParallel::new(&mut opt)?;
    for step in 1..4 {
        sharded.backward(&model.loss(&data(step, 0, group.rank())))?;
        opt.step()?;
        opt.zero_grad()?;
        step_alone(&alone, &mut *single, &large_batch(step, 1, group.size()), None)?;
        close(&model.values(), &alone.values()).with_context(|| format!("step {step}"))?;
    }
    // Two parameters of one shape keep their own states.
    let named = |names: [&str; 2]| {
        let one = |name: &str| Parameter::named(name, Tensor::ones([4], DOUBLE).set_requires_grad(true));
        names.map(one).into_iter().collect::<Vec<_>>()
    };
    let build = |params: Vec<Parameter>| AdamW::builder(params).lr(0.1).build();
    let (first, second) = (named(["a", "b"]), named(["b", "a"]));
    let mut one = ZeroRedundancyOptimizer::new(first.iter().map(Parameter::share).collect::<Vec<_>>(), group, build)?;
    (first[0].tensor().sum(Kind::Double) + first[1].tensor().sum(Kind::Double) * 5.0).backward();
    one.step()?;
    let mut whole = None;
    for to in 0..group.size() {
        whole = one.consolidate_state_dict(to)?.or(whole);
    }
    let mut other = ZeroRedundancyOptimizer::new(second, group, build)?;
    other.load_state_dict(&whole.context("no state")?)?;
    let told = |opt: &ZeroRedundancyOptimizer<AdamW>| -> Result<Vec<(String, Tensor)>> {
        let state = group.all_gather_object(&values(opt)?)?.concat();
        let mut state: Vec<_> = state.into_iter().map(|(key, value)| (key, Tensor::from_slice(&value))).collect();
        state.sort_by(|one, other| one.0.cmp(&other.0));
        Ok(state)
    };
    same(&told(&other)?, &told(&one)?)
}

/// The first moments of this rank's parameters by name.
fn values(opt: &ZeroRedundancyOptimizer<AdamW>) -> Result<Vec<(String, Vec<f64>)>> {
    let state = crate::model::tensors(&opt.state_dict()?);
    let own = state.into_iter().filter(|(key, _)| key.ends_with(".exp_avg"));
    own.map(|(key, tensor)| Ok((key, Vec::<f64>::try_from(tensor)?))).collect()
}
