//! Sharded optimizers together with accumulators, wrappers and scalers.

use anyhow::{Context, Result, ensure};
use overdrive_accum::{Accumulator, GradientNoiseScale, Samples};
use overdrive_amp::GradScaler;
use overdrive_core::{Entry, Optimizer, OptimizerError, OptimizerId, Parameter, Stateful};
use overdrive_ddp::{DistributedDataParallel, ProcessGroup};
use overdrive_optim::{AdamW, Joint, Lamb, Lookahead, LowPrecision, Sam, Sgd};
use overdrive_shard::{ShardError, ShardedDataParallel, ZeroRedundancyOptimizer};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;
use crate::model::{DOUBLE, Model, SAMPLES, data};
use crate::zero::{adamw, sgd};

/// An accumulator has to be given what averages the gradients.
pub fn accumulators(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let model = Model::new(1);
    let mut opt = ZeroRedundancyOptimizer::new(&model.vs, &group, sgd)?;
    let loss = || model.loss(&data(0, 0, 0));
    let told = Accumulator::new(2)?.backward(&opt, &loss(), Samples(SAMPLES), false);
    ensure!(told.is_err_and(|error| error.to_string().contains("with_sync(&ddp)")));
    let told = Accumulator::new(2)?.with_sync(group.clone()).backward(&opt, &loss(), Samples(SAMPLES), false);
    ensure!(told.is_err_and(|error| error.to_string().contains("with_sync(&ddp)")));

    let sharded = ShardedDataParallel::new(&mut opt)?;
    let accum = Accumulator::new(1)?.with_sync(&sharded);
    let told = GradientNoiseScale::new(0.9)?.observe(&accum, &opt, None);
    ensure!(told.is_err_and(|error| error.to_string().contains("the norm seen here would be that of a part")));
    let told = Sam::new(opt, 0.05)?.ascend();
    ensure!(told.is_err_and(|error| error.to_string().contains("would climb by the norm of its part")));
    Ok(())
}

/// The values of a model are the same on all ranks.
fn agree(group: &ProcessGroup, params: &[Parameter]) -> Result<()> {
    for param in params {
        for other in group.all_gather(&param.tensor().detach().contiguous())? {
            ensure!(other.equal(param.tensor()), "{:?} differs", param.name());
        }
    }
    Ok(())
}

/// Slow weights of float32 masters, which are on one rank each: around the sharded optimizer they would be those of the
/// rounded parameters.
fn slow_weights(group: &ProcessGroup) -> Result<()> {
    let weights = |kind: Kind| {
        tch::manual_seed(1);
        let values = |_| Tensor::randn([6, 5], (Kind::Float, Device::Cpu)).to_kind(kind).set_requires_grad(true);
        let named = |number: i32| Parameter::named(format!("weight{number}"), values(number));
        (0..3).map(named).collect::<Vec<_>>()
    };
    let masters =
        |params: Vec<Parameter>| AdamW::builder(params).lr(0.01).low_precision(LowPrecision::MasterCopy).build();
    let around = |kind: Kind, group: &ProcessGroup| -> Result<Lookahead<ZeroRedundancyOptimizer<AdamW>>> {
        Ok(Lookahead::new(ZeroRedundancyOptimizer::new(weights(kind), group, masters)?, 2, 0.5)?)
    };
    let told = around(Kind::BFloat16, group).map(drop).expect_err("slow weights of rounded parameters");
    let told = told.downcast::<OptimizerError>()?;
    ensure!(matches!(told, OptimizerError::DoesNotFit { .. }) && told.to_string().contains("closure"), "{told:?}");

    let (sharded, whole) = (weights(Kind::BFloat16), weights(Kind::BFloat16));
    let inside = |params: Vec<Parameter>| Lookahead::new(masters(params)?, 2, 0.5);
    let zero = ZeroRedundancyOptimizer::new(&sharded, group, inside)?;
    steps_alike(group, (zero, &sharded), (inside(whole.iter().map(Parameter::share).collect())?, &whole))?;
    // Around a group of one rank, which has all masters, and around float32 parameters.
    for own in 0..group.size() {
        let Some(one) = group.new_group(&[own])? else { continue };
        let (sharded, whole) = (weights(Kind::BFloat16), weights(Kind::BFloat16));
        let zero = Lookahead::new(ZeroRedundancyOptimizer::new(&sharded, &one, masters)?, 2, 0.5)?;
        steps_alike(&one, (zero, &sharded), (inside(whole.iter().map(Parameter::share).collect())?, &whole))?;
    }
    let (sharded, whole) = (weights(Kind::Float), weights(Kind::Float));
    let zero = Lookahead::new(ZeroRedundancyOptimizer::new(&sharded, group, masters)?, 2, 0.5)?;
    steps_alike(group, (zero, &sharded), (inside(whole.iter().map(Parameter::share).collect())?, &whole))
}

/// Five steps of both are the same, to the bit, on all ranks.
fn steps_alike<A: Optimizer, B: Optimizer>(
    group: &ProcessGroup,
    (mut zero, sharded): (A, &[Parameter]),
    (mut plain, whole): (B, &[Parameter]),
) -> Result<()> {
    for step in 0..5 {
        for (opt, params) in [(&mut zero as &mut dyn Optimizer, sharded), (&mut plain, whole)] {
            params.iter().for_each(|param| param.tensor().square().sum(Kind::Float).backward());
            opt.step()?;
            opt.zero_grad()?;
        }
        agree(group, sharded)?;
        for (one, other) in sharded.iter().zip(whole) {
            ensure!(one.tensor().equal(other.tensor()), "step {step}: {:?} differs", one.name());
        }
    }
    Ok(())
}

pub fn optimizers(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    slow_weights(&group)?;
    // An option that makes parameters depend on one another, loaded later.
    let params: Vec<Parameter> = (0..2)
        .map(|it| Parameter::named(format!("p{it}"), Tensor::ones([3], DOUBLE).set_requires_grad(true)))
        .collect();
    let mut opt = ZeroRedundancyOptimizer::new(&params, &group, |params| Lamb::builder(params).lr(0.1).build())?;
    let mut state = opt.state_dict()?;
    state.insert("param_groups.0.max_grad_norm", Entry::Float(1.0));
    opt.load_state_dict(&state)?;
    ensure!(opt.step().is_err_and(|error| error.to_string().contains("depends on all others")));
    // Parameters that `DistributedDataParallel` ignores.
    let model = Model::new(1);
    let ddp = DistributedDataParallel::builder(&group).ignore(["layer3.bias"]).build(&model.vs)?;
    let mut opt = ZeroRedundancyOptimizer::new(&model.vs, &group, adamw)?;
    let told = opt.step();
    drop(ddp);
    ensure!(told.is_err_and(|error| error.to_string().contains("was told to ignore it")));
    Ok(())
}

/// An optimizer whose step fails.
struct Failing(Vec<Parameter>, OptimizerId);

impl Optimizer for Failing {
    fn id(&self) -> OptimizerId {
        self.1
    }

    fn params(&self) -> Vec<Tensor> {
        self.0.iter().map(|param| param.tensor().shallow_clone()).collect()
    }

    fn num_groups(&self) -> usize {
        1
    }

    fn lr(&self, _: usize) -> Option<f64> {
        None
    }

    fn set_lr(&mut self, _: usize, _: f64) -> Result<(), OptimizerError> {
        Ok(())
    }

    fn step(&mut self) -> Result<(), OptimizerError> {
        Err(OptimizerError::NeedsClosure)
    }

    fn zero_grad(&mut self) -> Result<(), OptimizerError> {
        Ok(())
    }
}

fn is_other_rank(error: &OptimizerError, expected: usize) -> bool {
    let OptimizerError::Sync(error) = error else { return false };
    matches!(error.0.downcast_ref(), Some(ShardError::OtherRank { rank, .. }) if *rank == expected)
}

pub fn failures(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let rank = group.rank();
    // The step inside fails on rank 1 alone.
    let build = |params: Vec<Parameter>| -> Result<Box<dyn Optimizer>, OptimizerError> {
        let plain = Sgd::builder(params.iter().map(Parameter::share).collect::<Vec<_>>()).lr(0.1).build()?;
        Ok(if rank == 1 { Box::new(Failing(params, OptimizerId::new())) } else { Box::new(plain) })
    };
    let ones = || vec![0, 1, 2].into_iter().map(|_| Tensor::ones([4], DOUBLE).set_requires_grad(true));
    let mut opt = ZeroRedundancyOptimizer::new(ones().collect::<Vec<_>>(), &group, build);
    // Rank 1 tells no rate, which the ranks would notice.
    ensure!(matches!(&opt, Err(ShardError::RanksDisagree { rank: 1, .. })), "{:?}", opt.as_ref().map(drop));
    let build = |params: Vec<Parameter>| -> Result<Box<dyn Optimizer>, OptimizerError> {
        Ok(Box::new(Failing(params, OptimizerId::new())))
    };
    opt = ZeroRedundancyOptimizer::new(ones().take(1).collect::<Vec<_>>(), &group, build);
    let told = opt?.step().expect_err("the step inside fails on rank 0, the others have no part");
    match rank {
        0 => ensure!(matches!(told, OptimizerError::NeedsClosure), "{told:?}"),
        _ => ensure!(is_other_rank(&told, 0), "{told:?}"),
    }

    // Two sharded optimizers as one: a gradient that rank 1 refuses.
    let (one, two): (Vec<_>, Vec<_>) = (ones().collect(), ones().collect());
    let sharded = |params: &[Tensor], name: &str| {
        let named =
            params.iter().enumerate().map(|(at, it)| Parameter::named(format!("{name}{at}"), it.shallow_clone()));
        let build = |params: Vec<Parameter>| Sgd::builder(params).lr(0.1).build();
        ZeroRedundancyOptimizer::new(named.collect::<Vec<_>>(), &group, build)
    };
    let mut joint = Joint::new(sharded(&one, "a")?, sharded(&two, "b")?)?;
    one.iter().chain(&two).for_each(|it| it.sum(Kind::Double).backward());
    let at = joint.optimizers().0.owners().iter().position(|&owner| owner == 1).context("rank 1 has none")?;
    let sparse = one[at].grad().to_sparse(None, None::<&[i64]>, None::<i64>);
    overdrive_ffi::set_grad(&one[at], Some(&sparse))?;
    let told = joint.step().expect_err("a sparse gradient was taken");
    match rank {
        1 => ensure!(matches!(told, OptimizerError::InvalidParameter { .. }), "{told:?}"),
        _ => ensure!(is_other_rank(&told, 1), "{told:?}"),
    }
    ensure!(one.iter().chain(&two).all(|it| it.detach() == Tensor::ones([4], DOUBLE)), "nothing has changed");

    // A float16 gradient on rank 2 alone, which a scaler refuses: the others skip the step.
    let halves: Vec<Tensor> =
        (0..3).map(|_| Tensor::ones([4], (Kind::Half, Device::Cpu)).set_requires_grad(true)).collect();
    let build = |params: Vec<Parameter>| Sgd::builder(params).lr(0.1).build();
    let mut opt = ZeroRedundancyOptimizer::new(&halves, &group, build)?;
    let mut scaler = GradScaler::builder(Device::Cpu).init_scale(2.0).build()?;
    let _scaled = scaler.scale(&Tensor::from(1f32))?;
    if rank == 2 {
        overdrive_ffi::set_grad(&halves[0], Some(&halves[0].ones_like().detach()))?;
    }
    match rank {
        2 => ensure!(scaler.unscale_(&mut opt).is_err()),
        _ => {
            scaler.unscale_(&mut opt)?;
            ensure!(scaler.step(&mut opt)?.skipped()?, "the step was not skipped");
        }
    }
    Ok(())
}
