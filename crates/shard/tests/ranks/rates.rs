//! Rates and momenta that are set through a sharded optimizer, beside the whole one.

use anyhow::{Context, Result, ensure};
use overdrive_core::{IntoParameters, Optimizer, Parameter, Stateful};
use overdrive_ddp::ProcessGroup;
use overdrive_optim::AdamW;
use overdrive_shard::ZeroRedundancyOptimizer;

use crate::harness::Meeting;
use crate::model::{Model, data, same, step_alone};
use crate::zero::adamw;

type Zero = ZeroRedundancyOptimizer<Box<dyn Optimizer>>;

/// A rate and a momentum of its own for each group and step, as a schedule sets them.
fn set(opt: &mut dyn Optimizer, step: usize) -> Result<()> {
    for group in 0..opt.num_groups() {
        opt.set_lr(group, 0.01 * (1 + step + 3 * group) as f64)?;
        opt.set_momentum(group, 0.9 - 0.01 * (step + 2 * group) as f64)?;
    }
    Ok(())
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let (model, whole) = (Model::new(1), Model::new(1));
    let mut zero = Zero::new(&model.vs, &group, adamw)?;
    let mut plain = adamw((&whole.vs).into_parameters())?;
    let both = |zero: &mut Zero, model: &Model, plain: &mut dyn Optimizer, step: usize| -> Result<()> {
        step_alone(model, zero, &data(step, 0, 0), None)?;
        step_alone(&whole, plain, &data(step, 0, 0), None)?;
        for group in 0..2 {
            ensure!(zero.lr(group) == plain.lr(group) && zero.momentum(group) == plain.momentum(group));
        }
        same(&model.values(), &whole.values()).with_context(|| format!("step {step}"))
    };
    for step in 0..4 {
        set(&mut zero, step)?;
        set(&mut *plain, step)?;
        both(&mut zero, &model, &mut *plain, step)?;
    }
    // After loading this rank's part, and the whole state: the saved rates first, then those of the schedule.
    let part = zero.state_dict()?.copied()?;
    let state = plain.as_stateful().context("a state")?.state_dict()?.copied()?;
    let values = model.values();
    for from in [part, state.copied()?] {
        let resumed = Model::new(2);
        for restored in [&resumed, &whole] {
            let _no_grad = tch::no_grad_guard();
            let variables = restored.vs.variables();
            values.iter().for_each(|(name, value)| variables[name].shallow_clone().copy_(value));
        }
        let mut plain = adamw((&whole.vs).into_parameters())?;
        plain.as_stateful_mut().context("a state")?.load_state_dict(&state)?;
        let mut zero = Zero::new(&resumed.vs, &group, adamw)?;
        zero.load_state_dict(&from)?;
        both(&mut zero, &resumed, &mut *plain, 4)?;
        set(&mut zero, 5)?;
        set(&mut *plain, 5)?;
        both(&mut zero, &resumed, &mut *plain, 5)?;
    }
    let pair = group.new_group(&[0, 1])?;
    pair.map_or(Ok(()), |pair| options(&pair)).context("other options")
}

/// Options of the optimizer inside, changed on all ranks. Of two ranks, each has parameters of both groups.
fn options(group: &ProcessGroup) -> Result<()> {
    let build = |params: Vec<Parameter>| AdamW::builder(params).lr(0.01).decay_groups().build();
    let (model, whole) = (Model::new(1), Model::new(1));
    let mut zero = ZeroRedundancyOptimizer::new(&model.vs, group, build)?;
    let mut plain = build((&whole.vs).into_parameters())?;
    for step in 0..4 {
        let decay = 0.1 * step as f64;
        let inner = zero.inner_mut().context("this rank has parameters")?;
        ensure!(inner.num_groups() == 2);
        for opt in [inner, &mut plain] {
            opt.group_mut(0)?.weight_decay(decay).apply()?;
            opt.group_mut(1)?.eps(1e-8 * (1.0 + decay)).apply()?;
        }
        step_alone(&model, &mut zero, &data(step, 0, 0), None)?;
        step_alone(&whole, &mut plain, &data(step, 0, 0), None)?;
        same(&model.values(), &whole.values()).with_context(|| format!("step {step}"))?;
    }
    // A rate that the sharded optimizer does not know of, and would not save.
    if group.rank() == 1 {
        zero.inner_mut().context("this rank has parameters")?.set_lr(0, 0.5)?;
    }
    let told = zero.step().expect_err("a rate of one rank was taken");
    ensure!(told.to_string().contains("call `set_lr` of the sharded optimizer"), "{told}");
    zero.set_lr(0, 0.5)?;
    plain.set_lr(0, 0.5)?;
    step_alone(&model, &mut zero, &data(4, 0, 0), None)?;
    step_alone(&whole, &mut plain, &data(4, 0, 0), None)?;
    same(&model.values(), &whole.values())
}
