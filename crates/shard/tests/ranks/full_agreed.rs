//! ZeRO-3 where ranks differ or one fails between two exchanges: all hear of it, and none waits for the others.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use overdrive_core::{GradientSync, Optimizer, OptimizerError, OptimizerId, Parameter, Stateful};
use overdrive_ddp::ProcessGroup;
use overdrive_ffi::set_grad;
use overdrive_optim::Sgd;
use overdrive_shard::{FullyShardedDataParallel, ShardError};
use tch::{Kind, Tensor};

use crate::full_failures::{Pair, is_of_rank_1};
use crate::harness::Meeting;
use crate::model::{DOUBLE, data};

/// How long ranks wait for what does not come, where it should.
const WAIT: Duration = Duration::from_secs(60);

fn group_of(meeting: &Meeting) -> Result<ProcessGroup> {
    meeting.group_with(WAIT, false)
}

fn is_disagreement(told: &str, what: &str) -> Result<()> {
    ensure!(told.contains("the ranks disagree") && told.contains(what), "{told}, but should name {what}");
    Ok(())
}

/// Norms, rates and momenta.
pub fn values(meeting: &Meeting) -> Result<()> {
    let group = group_of(meeting)?;
    let (rank, mut pair) = (group.rank(), Pair::new(&group)?);
    pair.goes_on()?;
    let max_norm = if rank == 1 { 0.5 } else { 1.0 };
    let told = pair.sharded.fsdp.clip_grad_norm_(max_norm).map(drop).expect_err("other norms");
    is_disagreement(&told.to_string(), "`max_norm`")?;
    let (lr, momentum) = (pair.opt.lr(0).context("a rate")?, pair.opt.momentum(0).context("a momentum")?);
    for at in 0..3 {
        pair.sharded.fsdp.backward(&pair.sharded.loss(&data(0, 0, rank))?)?;
        if rank == 1 {
            match at {
                0 => pair.opt.set_lr(0, 0.5 * lr)?,
                1 => pair.opt.inner_mut().set_lr(0, 0.5 * lr)?,
                _ => pair.opt.set_momentum(0, 0.5)?,
            }
        }
        let told = pair.opt.step().expect_err("other rates");
        is_disagreement(&told.to_string(), if at == 2 { "momentum" } else { "rate" })?;
        pair.opt.set_lr(0, lr)?;
        pair.opt.set_momentum(0, momentum)?;
        pair.opt.zero_grad()?;
        pair.goes_on().with_context(|| format!("after other values, {at}"))?;
    }
    Ok(())
}

/// A failure of one rank after all have agreed: what is gathered ahead is the same on all afterwards.
pub fn ahead(meeting: &Meeting) -> Result<()> {
    let group = group_of(meeting)?;
    let (rank, mut pair) = (group.rank(), Pair::new(&group)?);
    for _ in 0..2 {
        pair.goes_on()?;
    }
    // The next unit's parameter is another tensor on rank 1 while it is gathered.
    let weight = pair.sharded.model.vs.variables()["layer2.weight"].shallow_clone();
    let kept = weight.detach();
    let told = pair.sharded.fsdp.try_forward(data(9, 0, rank).0, |x| {
        let x = pair.sharded.layer(0, x)?;
        let x = pair.sharded.layer(1, x)?;
        if rank == 1 {
            let _no_grad = tch::no_grad_guard();
            weight.shallow_clone().set_data(&Tensor::ones([8, 12], DOUBLE));
        }
        let x = pair.sharded.layer(2, x)?;
        pair.sharded.layer(3, x)
    });
    if rank == 1 {
        let text = told.map_or_else(|error| error.to_string(), |_| "it was filled".to_owned());
        ensure!(text.contains("parameter `layer2.weight`: it was replaced after it was sharded"), "{text}");
        let _no_grad = tch::no_grad_guard();
        weight.shallow_clone().set_data(&kept);
    } else {
        let told = told.and_then(|outputs| pair.sharded.fsdp.backward(&outputs.sum(Kind::Double)));
        ensure!(matches!(&told, Err(ShardError::OtherRank { rank: 1, .. })), "{told:?}");
    }
    for _ in 0..3 {
        pair.goes_on().context("after a failure of one rank")?;
    }
    // After evaluations, a rank steps while the others clip.
    let evaluates = |pair: &Pair| -> Result<()> {
        for _ in 0..2 {
            let _loss = tch::no_grad(|| pair.sharded.loss(&data(0, 0, rank)))?;
        }
        Ok(())
    };
    evaluates(&pair)?;
    let told = match rank {
        1 => pair.opt.step().map_err(|error| error.to_string()),
        _ => pair.sharded.fsdp.clip_grad_norm_(1.0).map(drop).map_err(|error| error.to_string()),
    };
    is_disagreement(&told.expect_err("one steps, the others clip"), "clipping")?;
    evaluates(&pair).context("after a step of one rank")?;
    // Rows are loaded on one rank.
    if rank == 1 {
        let copy = pair.sharded.fsdp.state_dict()?.copied()?;
        pair.sharded.fsdp.load_state_dict(&copy)?;
    }
    evaluates(&pair).context("after rows were loaded on one rank")?;
    pair.goes_on()
}

/// A rank follows a pass that leaves gradients local, and does not do so itself.
pub fn follows(meeting: &Meeting) -> Result<()> {
    let group = group_of(meeting)?;
    let (rank, mut pair) = (group.rank(), Pair::new(&group)?);
    pair.goes_on()?;
    for holds_in_turn in [false, true] {
        let held = pair.sharded.fsdp.no_sync();
        pair.sharded.fsdp.backward(&pair.sharded.loss(&data(0, 0, rank))?)?;
        drop(held);
        let loss = pair.sharded.loss(&data(0, 1, rank))?;
        let held = ((rank == 1) == holds_in_turn).then(|| pair.sharded.fsdp.no_sync());
        let told = match rank {
            1 => pair.sharded.fsdp.close_with_nothing().map_err(|error| error.to_string()),
            _ => pair.sharded.fsdp.backward(&loss).map_err(|error| error.to_string()),
        };
        drop(held);
        is_disagreement(&told.expect_err("one holds, the other does not"), "gradients local")?;
        pair.opt.zero_grad()?;
        pair.goes_on().context("after a pass that one rank held")?;
    }
    // None has a loss, and one holds.
    let held = (rank == 1).then(|| pair.sharded.fsdp.no_sync());
    let told = pair.sharded.fsdp.close_with_nothing().map_err(|error| error.to_string());
    drop(held);
    is_disagreement(&told.expect_err("one holds, the others do not"), "gradients local")?;
    // A parameter that was frozen meanwhile is named by the rank that follows too.
    let bias = pair.sharded.model.vs.variables()["layer1.bias"].shallow_clone();
    let loss = pair.sharded.loss(&data(0, 0, rank))?;
    if rank == 1 {
        let _frozen = bias.set_requires_grad(false);
    }
    let told = match rank {
        1 => pair.sharded.fsdp.close_with_nothing().map_err(|error| error.to_string()),
        _ => pair.sharded.fsdp.backward(&loss).map_err(|error| error.to_string()),
    };
    ensure!(told.as_ref().is_err_and(|it| it.contains("frozen or unfrozen")), "{told:?}");
    if rank == 1 {
        let _trained = bias.set_requires_grad(true);
    }
    pair.goes_on()
}

/// Passes that fail at their end, on one rank.
pub fn ends(meeting: &Meeting) -> Result<()> {
    let group = group_of(meeting)?;
    let (rank, mut pair) = (group.rank(), Pair::new(&group)?);
    // A frozen parameter that the whole model keeps, and a forward writes to.
    let frozen = Tensor::ones([6, 4], DOUBLE);
    let weight = Tensor::ones([6, 4], DOUBLE).set_requires_grad(true);
    let named = [("frozen", &frozen), ("weight", &weight)];
    let fsdp = FullyShardedDataParallel::builder(&group)?.build(named)?;
    let loss = |writes: bool| {
        fsdp.forward(Tensor::ones([4, 6], DOUBLE), |x| {
            let outputs = (x.matmul(&weight) + x.matmul(&frozen)).sum(Kind::Double);
            if writes {
                let _written = tch::no_grad(|| frozen.shallow_clone().zero_());
            }
            outputs
        })
    };
    let told = fsdp.backward(&loss(rank == 1)?);
    match rank {
        1 => ensure!(told.as_ref().is_err_and(|it| it.to_string().contains("`frozen`: it was written to")), "{told:?}"),
        _ => is_of_rank_1(&told, "`frozen`: it was written to")?,
    }
    let told = match rank {
        1 => {
            let _lost = loss(true)?;
            fsdp.close_with_nothing().map_err(|error| error.to_string())
        }
        _ => fsdp.backward(&loss(false)?).map_err(|error| error.to_string()),
    };
    ensure!(told.as_ref().is_err_and(|it| it.contains("`frozen`: it was written to")), "{told:?}");
    fsdp.backward(&loss(false)?)?;
    let sum = fsdp.parameters()[1].tensor().grad();
    ensure!(sum.eq(4.0).all().int64_value(&[]) == 1, "{sum}");
    // Gradients that a rank cannot add to: the others hear of it before their next exchange.
    pair.goes_on()?;
    let loss = pair.sharded.loss(&data(0, 0, rank))?;
    if rank == 1 {
        let param = pair.sharded.fsdp.parameters().swap_remove(0);
        let one = Tensor::ones([1], DOUBLE).expand(param.tensor().size(), false);
        set_grad(param.tensor(), Some(&one))?;
    }
    let told = pair.sharded.fsdp.backward(&loss);
    match rank {
        1 => ensure!(matches!(told, Err(ShardError::Torch(_))), "{told:?}"),
        _ => {
            ensure!(told.is_ok(), "{told:?}");
            let told = pair.opt.step().map_err(ShardError::from);
            ensure!(told.as_ref().is_err_and(|it| it.to_string().contains("rank 1 reports")), "{told:?}");
        }
    }
    pair.goes_on().context("after gradients that could not be added")
}

#[derive(Clone, Copy, PartialEq)]
enum Panics {
    Never,
    InCheck,
    InStep,
}

/// An optimizer that panics where it is told to.
struct Panicking(Sgd, Panics);

impl Optimizer for Panicking {
    fn id(&self) -> OptimizerId {
        self.0.id()
    }

    fn params(&self) -> Vec<Tensor> {
        self.0.params()
    }

    fn num_groups(&self) -> usize {
        1
    }

    fn group_lens(&self) -> Option<Vec<usize>> {
        self.0.group_lens()
    }

    fn lr(&self, group: usize) -> Option<f64> {
        self.0.lr(group)
    }

    fn set_lr(&mut self, group: usize, lr: f64) -> Result<(), OptimizerError> {
        self.0.set_lr(group, lr)
    }

    fn step(&mut self) -> Result<(), OptimizerError> {
        assert!(self.1 != Panics::InStep, "a panic of the test");
        self.0.step()
    }

    fn check_step(&self) -> Result<(), OptimizerError> {
        assert!(self.1 != Panics::InCheck, "a panic of the test");
        Ok(())
    }

    fn zero_grad(&mut self) -> Result<(), OptimizerError> {
        self.0.zero_grad()
    }
}

/// Panics in an optimizer and in making it, and a whole state that a rank cannot gather.
pub fn panics(meeting: &Meeting) -> Result<()> {
    let group = group_of(meeting)?;
    let (rank, mut pair) = (group.rank(), Pair::new(&group)?);
    pair.goes_on()?;
    let build = |params: Vec<Parameter>| Sgd::builder(params).lr(0.1).build();
    let made = catch_unwind(AssertUnwindSafe(|| {
        pair.sharded.fsdp.optimizer(|params| {
            assert!(rank != 1, "a panic of the test");
            build(params)
        })
    }));
    match (rank, made) {
        (1, told) => ensure!(told.is_err(), "it was swallowed"),
        (_, Ok(told)) => is_of_rank_1(&told.map(drop), "has panicked")?,
        (_, Err(_)) => anyhow::bail!("rank {rank} has panicked"),
    }
    pair.goes_on().context("after a panic in making an optimizer")?;

    // Before ranks agree on a step, and after it.
    let mut opt = pair.sharded.fsdp.optimizer(|params| Ok(Panicking(build(params)?, Panics::Never)))?;
    for panics in [Panics::InCheck, Panics::InStep] {
        pair.sharded.fsdp.backward(&pair.sharded.loss(&data(0, 0, rank))?)?;
        let before: Vec<Tensor> = pair.sharded.fsdp.parameters().iter().map(|it| it.tensor().detach().copy()).collect();
        opt.inner_mut().1 = if rank == 1 { panics } else { Panics::Never };
        match (rank, catch_unwind(AssertUnwindSafe(|| opt.step()))) {
            (1, told) => ensure!(told.is_err(), "it was swallowed"),
            (_, Ok(told)) => {
                ensure!(told.as_ref().is_err_and(|it| it.to_string().contains("has panicked")), "{told:?}");
            }
            (_, Err(_)) => anyhow::bail!("rank {rank} has panicked"),
        }
        opt.inner_mut().1 = Panics::Never;
        // The others have stepped already, where it came after the agreement.
        for (param, before) in pair.sharded.fsdp.parameters().iter().zip(&before) {
            let _no_grad = tch::no_grad_guard();
            param.tensor().shallow_clone().f_copy_(before)?;
        }
        pair.opt.zero_grad()?;
        pair.goes_on().context("after a panic in a step")?;
    }

    // Rows that rank 1 cannot send.
    let param = pair.sharded.fsdp.parameters().swap_remove(1);
    let kept = param.tensor().detach();
    let _no_grad = tch::no_grad_guard();
    if rank == 1 {
        param.tensor().shallow_clone().set_data(&Tensor::ones([500, 500], DOUBLE));
    }
    let told = pair.sharded.fsdp.consolidate_state_dict(0).map(drop);
    // Those of a forward neither.
    let loss = pair.sharded.loss(&data(0, 0, rank)).map(drop);
    let replaced = |told: Result<(), ShardError>| -> Result<()> {
        let text = told.map_or_else(|error| error.to_string(), |()| "no error".to_owned());
        let label = param.label(0);
        ensure!(text.contains(&format!("parameter {label}: this rank's rows were replaced")), "{text}");
        ensure!(rank == 1 || text.contains("rank 1 reports"), "{text}");
        Ok(())
    };
    replaced(loss)?;
    if rank == 1 {
        replaced(told)?;
        param.tensor().shallow_clone().set_data(&kept);
    } else {
        ensure!(matches!(&told, Err(ShardError::OtherRank { rank: 1, .. })), "{told:?}");
    }
    ensure!(pair.sharded.fsdp.consolidate_state_dict(0)?.is_some() == (rank == 0));
    tch::with_grad(|| pair.goes_on())
}
