//! What goes wrong on one rank is a named error on all, and changes nothing on any.

use anyhow::{Context, Result, ensure};
use overdrive_amp::GradScaler;
use overdrive_core::{
    Entry, IntoParameters, Optimizer, OptimizerError, Parameter, Shard, ShardedBy, StateDict, StateError, Stateful,
};
use overdrive_ddp::ProcessGroup;
use overdrive_optim::{AdamW, Lamb, Lbfgs, Prodigy, Sam, Sgd, SgdBuilder};
use overdrive_shard::{ShardError, ShardedDataParallel, ZeroRedundancyOptimizer};
use tch::{Device, Kind, Tensor};

use crate::harness::Meeting;
use crate::model::{Model, data, same, same_state, step_alone};
use crate::zero::{Build, adamw, sgd};

type Zero = ZeroRedundancyOptimizer<Box<dyn Optimizer>>;

/// Whether an optimizer's error is that another rank gave the step up.
fn is_other_rank(error: &OptimizerError, expected: usize) -> bool {
    let OptimizerError::Sync(error) = error else { return false };
    matches!(error.0.downcast_ref(), Some(ShardError::OtherRank { rank, .. }) if *rank == expected)
}

fn zeros(shape: &[i64], kind: Kind) -> Tensor {
    Tensor::zeros(shape, (kind, Device::Cpu)).set_requires_grad(true)
}

pub fn building(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let rank = group.rank();
    disagreements(&group)?;

    // The closure fails on rank 1 alone.
    let fails = |params: Vec<Parameter>| -> Result<Box<dyn Optimizer>, OptimizerError> {
        if rank == 1 { Err(OptimizerError::check_lr(-1.0).unwrap_err()) } else { sgd(params) }
    };
    let told = Zero::new(&Model::new(1).vs, &group, fails).map(drop);
    match rank {
        1 => ensure!(matches!(told, Err(ShardError::Optimizer(OptimizerError::InvalidOption { option: "lr", .. })))),
        _ => ensure!(
            matches!(&told, Err(ShardError::OtherRank { rank: 1, reason, .. }) if reason.contains("lr is -1")),
            "{told:?}"
        ),
    }

    // Optimizers that do not fit.
    let refused = |build: Build, text: &str| -> Result<()> {
        let told = Zero::new(&Model::new(1).vs, &group, build).map(drop);
        let fits = match &told {
            Err(ShardError::Optimizer(OptimizerError::DoesNotFit { reason, .. })) => reason.contains(text),
            // It does not fit on another rank alone.
            Err(ShardError::OtherRank { reason, .. }) => reason.contains(text),
            _ => false,
        };
        ensure!(fits, "{text}: {told:?}");
        Ok(())
    };
    refused(|params| Ok(Box::new(Prodigy::builder(params).build()?)), "depends on all others")?;
    refused(|params| Ok(Box::new(Lamb::builder(params).max_grad_norm(Some(1.0)).build()?)), "depends on all others")?;
    refused(|params| Ok(Box::new(Lbfgs::builder(params).build()?)), "depends on all others")?;
    refused(|params| Ok(Box::new(Sam::new(Sgd::builder(params).lr(0.1).build()?, 0.05)?)), "moves or averages")?;
    refused(|params| Ok(Box::new(Sgd::builder(params).lr(0.1).build_in_backward()?)), "steps in the backward pass")?;
    refused(|params| sgd(params.into_iter().skip(1).collect()), "leaves out parameters")?;
    refused(|_| sgd(vec![Parameter::named("own", zeros(&[2], Kind::Float))]), "was not given")?;
    // Groups by place among those given, which differ in a part.
    refused(
        |mut params| {
            let rest = params.split_off(1);
            let first = Sgd::builder(params).lr(0.1);
            Ok(Box::new(match rest.is_empty() {
                true => first.build()?,
                false => first.add_param_group(Sgd::group(rest)).build()?,
            }))
        },
        "other groups when it gets a part",
    )?;

    // Parameters that cannot be taken, by name.
    let wrong = |params: Vec<Parameter>, name: &str, text: &str| -> Result<()> {
        let told = Zero::new(params, &group, sgd).map(drop);
        let fits = matches!(&told, Err(ShardError::Optimizer(OptimizerError::InvalidParameter { parameter, reason }))
            if parameter == name && reason.contains(text));
        ensure!(fits, "{text}: {told:?}");
        Ok(())
    };
    let (one, twice) = (zeros(&[2], Kind::Float), zeros(&[2], Kind::Float));
    let named = |name: &str, tensor: &Tensor| Parameter::named(name, tensor.shallow_clone());
    wrong(vec![named("a", &one), named("b", &Tensor::new())], "`b`", "undefined")?;
    wrong(vec![named("a", &twice), named("b", &twice)], "`b`", "is parameter 0 again")?;
    let complex = Tensor::zeros([2], (Kind::ComplexFloat, Device::Cpu));
    wrong(vec![named("a", &one), named("b", &complex)], "`b`", "ComplexFloat")?;
    wrong(vec![named("a", &one), Parameter::unnamed(twice.shallow_clone())], "number 1", "name all parameters")?;
    let none = Zero::new(Vec::<Tensor>::new(), &group, sgd).map(drop);
    ensure!(matches!(none, Err(ShardError::Optimizer(OptimizerError::NoParameters))), "{none:?}");

    // Buckets of different sizes.
    let told = Zero::new(&Model::new(1).vs, &group, sgd)?.bucket_bytes(100 + rank / 2).map(drop);
    ensure!(
        matches!(&told, Err(ShardError::RanksDisagree { rank: 2, found, expected, .. })
            if found == "101" && expected == "100"),
        "{told:?}"
    );
    let mut opt = Zero::new(&Model::new(1).vs, &group, adamw)?;
    let told = ShardedDataParallel::with_bucket_bytes(&mut opt, 100 + rank / 2).map(drop);
    ensure!(matches!(told, Err(ShardError::RanksDisagree { rank: 2, .. })), "{told:?}");

    // After all this, the ranks still work together.
    opt.step()?;
    Ok(())
}

/// Ranks with other parameters, rates or groups get the same error.
fn disagreements(group: &ProcessGroup) -> Result<()> {
    let rank = group.rank();
    let of = |shape: &[i64], name: &str, frozen: bool, lr: f64| {
        let params = vec![
            Parameter::named("first", zeros(&[3], Kind::Double)),
            Parameter::named(name, zeros(shape, Kind::Double).set_requires_grad(!frozen)),
        ];
        ZeroRedundancyOptimizer::new(params, group, |params| Sgd::builder(params).lr(lr).build()).map(drop)
    };
    let differs = |told: Result<(), ShardError>, name: &str, found: &str, expected: &str| -> Result<()> {
        let fits = matches!(&told, Err(ShardError::RanksDisagree { what, rank: 2, found: f, expected: e })
            if what == name && f.contains(found) && e.contains(expected));
        ensure!(fits, "{name}: {told:?}");
        Ok(())
    };
    let last = rank == 2;
    differs(of(&[2, if last { 5 } else { 4 }], "x", false, 0.1), "parameter `x`", "[2, 5]", "[2, 4]")?;
    differs(of(&[2], "x", last, 0.1), "parameter `x`", "frozen", "Double of shape [2] in group 0")?;
    let lr = if last { 0.2 } else { 0.1 };
    differs(of(&[2], "x", false, lr), "group 0", "learning rate 0.2", "learning rate 0.1")?;
    let with = |builder: fn(SgdBuilder) -> SgdBuilder| {
        let params = vec![Parameter::named("x", zeros(&[2], Kind::Double))];
        let build = |params| if last { builder(Sgd::builder(params)) } else { Sgd::builder(params) }.lr(0.1).build();
        ZeroRedundancyOptimizer::new(params, group, build).map(drop)
    };
    differs(with(|it| it.weight_decay(0.5)), "param_groups.0.weight_decay", "0.5", "0")?;
    differs(with(|it| it.momentum(0.5)), "param_groups.0.momentum", "0.5", "0")?;
    differs(with(|it| it.maximize(true)), "param_groups.0.maximize", "true", "false")?;
    let name = if last { "y" } else { "x" };
    differs(of(&[2], name, false, 0.1), "number 1 of the parameters and groups", "parameter `y`", "parameter `x`")?;
    let params: Vec<_> = (0..if last { 3 } else { 2 }).map(|_| zeros(&[2], Kind::Float)).collect();
    let told = ZeroRedundancyOptimizer::new(params, group, |params| Sgd::builder(params).lr(0.1).build()).map(drop);
    differs(told, "number 2 of the parameters and groups", "parameter number 2", "group 0")
}

/// A step that cannot be made on one rank is made on none.
pub fn steps(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let rank = group.rank();
    let model = Model::new(1);
    let mut opt = Zero::new(&model.vs, &group, sgd)?;
    step_alone(&model, &mut opt, &data(0, 0, 0), None)?;
    let before = model.values();
    // A gradient that the rank with the parameter's state refuses.
    let params = opt.params();
    let at = opt.owners().iter().position(|&owner| owner == 1).context("rank 1 has none")?;
    model.loss(&data(1, 0, 0)).backward();
    let dense = params[at].grad();
    overdrive_ffi::set_grad(&params[at], Some(&dense.to_sparse(None, None::<&[i64]>, None::<i64>)))?;
    let told = opt.step().expect_err("a sparse gradient was taken");
    match rank {
        1 => ensure!(matches!(told, OptimizerError::InvalidParameter { .. }), "{told:?}"),
        _ => ensure!(is_other_rank(&told, 1), "{told:?}"),
    }
    same(&model.values(), &before)?;
    overdrive_ffi::set_grad(&params[at], Some(&dense))?;
    opt.step()?;
    ensure!(same(&model.values(), &before).is_err(), "the step was made");

    // A parameter that rank 2 adds to the optimizer inside, after the parameters were partitioned.
    let model = Model::new(1);
    let mut opt = ZeroRedundancyOptimizer::new(&model.vs, &group, |params| AdamW::builder(params).lr(0.01).build())?;
    step_alone(&model, &mut opt, &data(0, 0, 0), None)?;
    let before = model.values();
    if rank == 2 {
        let added = Parameter::named("added", zeros(&[2], Kind::Double));
        opt.inner_mut().context("rank 2 has parameters")?.add_param_group(AdamW::group(vec![added]))?;
    }
    model.loss(&data(1, 0, 0)).backward();
    let told = opt.step().expect_err("a parameter that is not on all ranks");
    match rank {
        2 => ensure!(told.to_string().contains("parameters were added to the optimizer inside"), "{told}"),
        _ => ensure!(is_other_rank(&told, 2) && told.to_string().contains("parameters were added"), "{told}"),
    }
    same(&model.values(), &before)?;
    // Groups and rates that do not exist.
    ensure!(matches!(opt.set_lr(7, 0.1), Err(OptimizerError::NoSuchGroup { group: 7, groups: 1 })));
    ensure!(matches!(opt.set_lr(0, f64::NAN), Err(OptimizerError::InvalidOption { .. })) && opt.lr(0) == Some(0.01));
    ensure!(opt.set_momentum(0, 1.5).is_err() && opt.set_momentum(1, 0.5).is_err() && opt.momentum(0) == Some(0.9));
    Ok(())
}

/// An infinity in the gradients of one rank, without `DistributedDataParallel`: all ranks skip the step, and lower the
/// scale.
pub fn scaler(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let model = Model::new(1);
    let mut opt = Zero::new(&model.vs, &group, sgd)?;
    let mut scaler = GradScaler::builder(Device::Cpu).init_scale(1024.0).growth_interval(2).build()?;
    let mut expected = 1024.0;
    for step in 0..6 {
        let before = model.values();
        let loss = scaler.scale(&model.loss(&data(step, 0, 0)))?;
        loss.backward();
        // On step 2 on rank 1 alone, on step 3 on rank 2 alone.
        let is_bad = matches!(step, 2 | 3);
        if is_bad && group.rank() == step - 1 {
            let mut first = opt.params()[0].grad().view([-1]).narrow(0, 0, 1);
            let _ = first.fill_(f64::INFINITY);
        }
        if step % 2 == 0 {
            scaler.unscale_(&mut opt)?;
        }
        let skipped = scaler.step(&mut opt)?.skipped()?;
        scaler.update()?;
        opt.zero_grad()?;
        ensure!(skipped == is_bad, "step {step}: skipped is {skipped}");
        ensure!(same(&model.values(), &before).is_ok() == is_bad, "step {step}");
        expected = match step {
            2 | 3 => expected / 2.0,
            1 | 5 => expected * 2.0,
            _ => expected,
        };
        let scales = group.all_gather_object(&scaler.scale_value()?)?;
        ensure!(scales.iter().all(|scale| *scale == expected), "step {step}: {scales:?}, not {expected}");
    }
    Ok(())
}

/// States of something else are refused, and change nothing.
pub fn states(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let model = Model::new(1);
    let mut opt = Zero::new(&model.vs, &group, adamw)?;
    step_alone(&model, &mut opt, &data(0, 0, 0), None)?;
    let whole = (0..2).try_fold(None, |own, to| Ok::<_, ShardError>(opt.consolidate_state_dict(to)?.or(own)))?;
    let whole = whole.context("no whole state")?;
    let part = opt.state_dict()?.copied()?;
    let changed = |state: &StateDict, change: &dyn Fn(&mut StateDict)| -> Result<StateDict> {
        let mut other = state.copied()?;
        change(&mut other);
        Ok(other)
    };
    let mut refused = |state: StateDict, text: &str| -> Result<()> {
        let told = opt.load_state_dict(&state).expect_err(text).to_string();
        ensure!(told.contains(text), "{text}: {told}");
        same_state(&opt.state_dict()?, &part)
    };
    let int = |key: &'static str, value: i64| move |state: &mut StateDict| state.insert(key, Entry::Int(value));
    let rank = group.rank() as i64;
    let of_shard = |shard: Shard| -> Result<StateDict> {
        let mut other = StateDict::of_shard(shard);
        part.copied()?.into_iter().for_each(|(key, entry)| other.insert(key, entry));
        Ok(other)
    };
    refused(
        of_shard(Shard { rank: 1 - group.rank(), ranks: 2, by: ShardedBy::Tensors })?,
        "should be the part of rank",
    )?;
    refused(of_shard(Shard { rank: group.rank(), ranks: 5, by: ShardedBy::Tensors })?, "of 5")?;
    // The plain optimizer would take what is missing for state that is not there yet.
    let mut plain = adamw((&model.vs).into_parameters())?;
    let told = plain.as_stateful_mut().context("a state")?.load_state_dict(&part).expect_err("a part").to_string();
    ensure!(told.contains("a whole state"), "{told}");
    refused(changed(&part, &int("strange", 5))?, "`strange`, which does not belong here")?;
    refused(changed(&whole, &int("strange", 5))?, "`strange`, which does not belong here")?;
    refused(changed(&whole, &int("state.other.exp_avg", 5))?, "`state.other.exp_avg`")?;
    refused(changed(&whole, &int("param_groups.2.lr", 5))?, "`param_groups.2.lr`")?;
    refused(changed(&whole, &int("param_groups.0.params", 5))?, "should be 4 parameters, but is 5")?;
    let name = |state: &mut StateDict| state.insert("param_groups.1.param_names.0", Entry::Text("other".to_owned()));
    refused(changed(&whole, &name)?, "the names of this group's parameters, including `")?;
    refused(StateDict::new(), "no entry")?;
    let rate = |key: &'static str, rate: f64| move |state: &mut StateDict| state.insert(key, Entry::Float(rate));
    refused(changed(&part, &rate("param_groups.1.lr", f64::NAN))?, "should be at least 0")?;
    refused(changed(&whole, &rate("param_groups.1.lr", -1.0))?, "should be at least 0")?;
    // The shape of one of this rank's tensors.
    let own = opt.owners().iter().position(|&owner| owner as i64 == rank).context("no own parameter")?;
    let own = format!("state.{}.exp_avg", opt.parameters()[own].name().context("a name")?);
    let mut refused = |state: StateDict| -> Result<()> {
        let told = opt.load_state_dict(&state);
        ensure!(matches!(&told, Err(StateError::Mismatch { key, .. }) if *key == own), "{told:?}");
        same_state(&opt.state_dict()?, &part)
    };
    let mut other = whole.copied()?;
    other.insert(own.clone(), Entry::Tensor(Tensor::zeros([7], (Kind::Double, Device::Cpu))));
    refused(other)?;
    // Different ranks, and a rank that does not exist, on all ranks; then the whole state again.
    let told = opt.consolidate_state_dict(group.rank()).map(drop);
    ensure!(
        matches!(&told, Err(ShardError::RanksDisagree { rank: 1, found, expected, .. })
            if found == "1" && expected == "0"),
        "{told:?}"
    );
    let told = opt.consolidate_state_dict(2).map(drop);
    ensure!(matches!(told, Err(ShardError::Ddp(_))), "{told:?}");
    opt.load_state_dict(&whole)?;
    same_state(&opt.state_dict()?, &part)?;
    Ok(())
}
