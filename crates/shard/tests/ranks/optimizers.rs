//! Every optimizer of `overdrive-optim` that steps each parameter by itself: sharded steps and states are those of the
//! whole optimizer, to the bit.

use anyhow::{Context, Result, ensure};
use overdrive_core::{Optimizer, OptimizerError, Parameter, Stateful};
use overdrive_optim::*;
use overdrive_shard::{ShardError, ZeroRedundancyOptimizer};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;
use crate::model::same_state;
use crate::zero::Build;

const STEPS: usize = 6;

macro_rules! built {
    ($($name:literal: |$params:ident| $builder:expr;)+) => {
        vec![$(($name, (|$params: Vec<Parameter>| {
            let built: Result<Box<dyn Optimizer>, OptimizerError> = Ok(Box::new($builder.build()?));
            built
        }) as Build)),+]
    };
}

const SHAPES: [&[i64]; 7] = [&[12, 10], &[12], &[16, 12], &[16], &[4, 2, 3, 3], &[1], &[300, 20]];
const MATRICES: [&[i64]; 5] = [&[12, 10], &[12, 20], &[16, 12], &[16, 16], &[30, 20]];

pub fn parameters(kind: Kind, shapes: &[&[i64]]) -> Vec<Parameter> {
    tch::manual_seed(7);
    let param = |(number, shape): (usize, &&[i64])| {
        let values = Tensor::randn(*shape, (Kind::Float, Device::Cpu)).to_kind(kind);
        Parameter::named(format!("block.{number}.weight"), values.set_requires_grad(true))
    };
    shapes.iter().enumerate().map(param).collect()
}

/// The same gradients on every rank.
fn make_gradients(params: &[Parameter], step: usize) -> Result<()> {
    tch::manual_seed(100 + step as i64);
    for (number, param) in params.iter().enumerate() {
        let tensor = param.tensor();
        let grad = Tensor::randn(tensor.size(), (Kind::Float, Device::Cpu)).to_kind(tensor.kind());
        // One parameter has no gradient in the first steps.
        let grad = (number != 3 || step > 2).then_some(&grad);
        overdrive_ffi::set_grad(tensor, grad)?;
    }
    Ok(())
}

/// Those that step each element by itself.
pub fn element_wise() -> Vec<(&'static str, Build)> {
    built! {
        "SGD": |it| Sgd::builder(it).lr(0.1);
        "SGD, Nesterov": |it| Sgd::builder(it).lr(0.1).momentum(0.9).nesterov(true);
        "Adam": |it| Adam::builder(it).lr(0.01);
        "Adam, AMSGrad": |it| Adam::builder(it).lr(0.01).amsgrad(true);
        "AdamW, groups": |it| AdamW::builder(it).lr(0.01).decay_groups();
        "AdamW, unfused": |it| AdamW::builder(it).lr(0.01).fused(false);
        "Adadelta": |it| Adadelta::builder(it);
        "Adagrad": |it| Adagrad::builder(it).lr(0.01);
        "Adamax": |it| Adamax::builder(it).lr(0.01);
        "ASGD": |it| Asgd::builder(it).lr(0.01);
        "Lion": |it| Lion::builder(it).lr(0.001);
        "NAdam": |it| NAdam::builder(it).lr(0.01);
        "RAdam": |it| RAdam::builder(it).lr(0.01);
        "RMSprop": |it| RmsProp::builder(it).lr(0.01);
        "Rprop": |it| Rprop::builder(it).lr(0.01);
    }
}

/// The same, over parameters of bfloat16.
pub fn element_wise_of_bfloat16() -> Vec<(&'static str, Build)> {
    built! {
        "AdamW, masters": |it| AdamW::builder(it).lr(0.01).low_precision(LowPrecision::MasterCopy);
        "SGD of bfloat16": |it| Sgd::builder(it).lr(0.1).momentum(0.9);
    }
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let mut float = built! {
        "SGD, groups that may be empty": |it| {
            let (matrices, vectors): (Vec<_>, Vec<_>) = it.into_iter().partition(|it| it.tensor().dim() > 1);
            Sgd::builder(matrices).lr(0.1).add_param_group(Sgd::group(vectors).lr(0.05))
        };
        "AdamW, layers": |it| AdamW::builder(it).lr(0.01).layer_decay(0.8, |name| usize::from(name < "block.4"));
        "AdamW of 8 bits": |it| AdamW8Bit::builder(it).lr(0.01);
        "Adafactor": |it| Adafactor::builder(it).lr(0.01);
        "LAMB": |it| Lamb::builder(it).lr(0.01);
        "LARS": |it| Lars::builder(it).lr(0.1);
    };
    float.extend(element_wise());
    let half = element_wise_of_bfloat16();
    let matrices = built! {
        "Muon": |it| Muon::builder(it).lr(0.02);
    };
    let all = float.into_iter().map(|it| (Kind::Float, &SHAPES[..], it));
    let all = all.chain(half.into_iter().map(|it| (Kind::BFloat16, &SHAPES[..], it)));
    for (kind, shapes, (name, build)) in all.chain(matrices.into_iter().map(|it| (Kind::Float, &MATRICES[..], it))) {
        equal(&group, || parameters(kind, shapes), build).context(name)?;
    }
    wrapped(&group)
}

fn equal(group: &overdrive_ddp::ProcessGroup, parameters: impl Fn() -> Vec<Parameter>, build: Build) -> Result<()> {
    let (sharded, whole) = (parameters(), parameters());
    let mut zero = ZeroRedundancyOptimizer::new(&sharded, group, build)?.bucket_bytes(1 << 12)?;
    let mut plain = build(whole.iter().map(Parameter::share).collect())?;
    ensure!(zero.num_groups() == plain.num_groups() && zero.group_lens() == plain.group_lens());
    for step in 0..STEPS {
        for number in 0..plain.num_groups() {
            ensure!(zero.lr(number) == plain.lr(number) && zero.momentum(number) == plain.momentum(number));
        }
        make_gradients(&sharded, step)?;
        make_gradients(&whole, step)?;
        zero.step()?;
        plain.step()?;
        for (one, other) in sharded.iter().zip(&whole) {
            ensure!(one.tensor().equal(other.tensor()), "step {step}: {:?} differs", one.name());
        }
    }
    let state = plain.as_stateful().context("a state")?.state_dict()?;
    let last = group.size() - 1;
    match zero.consolidate_state_dict(last)? {
        Some(gathered) if group.rank() == last => same_state(&gathered, &state)?,
        None if group.rank() != last => {}
        _ => anyhow::bail!("the state is on another rank"),
    }
    // Another run takes its parts of the whole, and makes the same step.
    let other = parameters();
    tch::no_grad(|| other.iter().zip(&whole).for_each(|(to, from)| to.tensor().shallow_clone().copy_(from.tensor())));
    let mut resumed = ZeroRedundancyOptimizer::new(&other, group, build)?;
    resumed.load_state_dict(&state.copied()?)?;
    for params in [&other, &whole] {
        make_gradients(params, STEPS)?;
    }
    resumed.step()?;
    plain.step()?;
    for (one, other) in other.iter().zip(&whole) {
        ensure!(one.tensor().equal(other.tensor()), "resumed: {:?} differs", one.name());
    }
    Ok(())
}

/// A wrapper's state has entries that no whole is made of; its parts are saved alone.
fn wrapped(group: &overdrive_ddp::ProcessGroup) -> Result<()> {
    let build = |params: Vec<Parameter>| Lookahead::new(AdamW::builder(params).lr(0.01).build()?, 2, 0.5);
    let params = parameters(Kind::Float, &SHAPES);
    let mut zero = ZeroRedundancyOptimizer::new(&params, group, build)?;
    make_gradients(&params, 0)?;
    zero.step()?;
    let told = zero.consolidate_state_dict(0).map(drop);
    ensure!(matches!(told, Err(ShardError::State(_))), "{told:?}");
    let part = zero.state_dict()?.copied()?;
    zero.load_state_dict(&part)?;
    same_state(&zero.state_dict()?, &part)
}
