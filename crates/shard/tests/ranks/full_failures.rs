//! ZeRO-3 where something goes wrong on one rank: an error on all, and ranks go on.

use std::panic::{AssertUnwindSafe, catch_unwind};

use anyhow::{Context, Result, ensure};
use overdrive_amp::GradScaler;
use overdrive_core::{IntoParameters, Optimizer, OptimizerError};
use overdrive_ddp::ProcessGroup;
use overdrive_ffi::autograd::{GradOptions, backward};
use overdrive_optim::{Sgd, clip_grad_norm_};
use overdrive_shard::{FullyShardedDataParallel, ShardError};
use tch::{Device, Kind, Tensor};

use crate::full::{Opt, Sharded};
use crate::harness::Meeting;
use crate::model::{DOUBLE, Model, close, data, large_batch, step_alone};
use crate::zero::sgd;

/// A sharded model beside the same one alone: after each failure both make a step.
pub struct Pair {
    pub sharded: Sharded,
    pub opt: Opt,
    alone: Model,
    single: Box<dyn Optimizer>,
    step: usize,
}

impl Pair {
    pub fn new(group: &ProcessGroup) -> Result<Self> {
        let sharded = Sharded::new(group, 1)?;
        let opt = sharded.fsdp.optimizer(sgd)?;
        let alone = Model::new(1);
        let single = sgd((&alone.vs).into_parameters())?;
        Ok(Self { sharded, opt, alone, single, step: 0 })
    }

    pub fn group(&self) -> &ProcessGroup {
        self.sharded.fsdp.process_group()
    }

    pub fn goes_on(&mut self) -> Result<()> {
        self.step += 1;
        let grads = self.opt.params().iter().filter(|it| it.grad().defined()).count();
        ensure!(grads == 0, "gradients are freed");
        self.sharded.fsdp.backward(&self.sharded.loss(&data(self.step, 0, self.group().rank()))?)?;
        self.opt.step()?;
        self.opt.zero_grad()?;
        let batch = large_batch(self.step, 1, self.group().size());
        step_alone(&self.alone, &mut *self.single, &batch, None)?;
        self.sharded.close_to(&self.alone)
    }
}

pub fn is_of_rank_1(told: &Result<(), ShardError>, text: &str) -> Result<()> {
    let fits = matches!(told, Err(ShardError::OtherRank { rank: 1, reason, .. }) if reason.contains(text));
    ensure!(fits, "{told:?}, but should be rank 1's: {text}");
    Ok(())
}

pub fn forward(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let (rank, mut pair) = (group.rank(), Pair::new(&group)?);
    pair.goes_on()?;

    // A panic in the second unit, and after all units.
    for at in [1, 3] {
        let batch = data(100 + at, 0, rank);
        let sharded = &pair.sharded;
        let run = || -> Result<(), ShardError> {
            let layers = |x| {
                (0..4).try_fold(x, |x, number| {
                    assert!(!(rank == 1 && number == at), "a panic of the test");
                    sharded.layer(number, x)
                })
            };
            let outputs = sharded.fsdp.try_forward(batch.0.shallow_clone(), layers)?;
            sharded.fsdp.backward(&outputs.square().mean(Kind::Double))
        };
        match (rank, catch_unwind(AssertUnwindSafe(run))) {
            (1, told) => ensure!(told.is_err(), "it was swallowed"),
            (_, Ok(told)) => is_of_rank_1(&told, "has panicked")?,
            (_, Err(_)) => anyhow::bail!("rank {rank} has panicked"),
        }
        pair.goes_on().with_context(|| format!("after a panic in layer {at}"))?;
    }

    // An error of the model in a unit.
    let told = pair.sharded.fsdp.try_forward(data(9, 0, rank).0, |x| {
        let x = pair.sharded.layer(0, x)?;
        if rank == 1 {
            return Err(ShardError::Unit { name: "mine".to_owned(), reason: "a failure of the test".to_owned() });
        }
        pair.sharded.layer(1, x)
    });
    let told = told.map(drop);
    match rank {
        1 => ensure!(matches!(&told, Err(ShardError::Unit { name, .. }) if name == "mine"), "{told:?}"),
        _ => is_of_rank_1(&told, "a failure of the test")?,
    }
    pair.goes_on().context("after an error in a forward")?;

    // Another order of units on rank 1.
    let order = if rank == 1 { [2, 1] } else { [1, 2] };
    let told = order.iter().try_for_each(|&number| {
        let inputs = Tensor::ones([1, [5, 16, 12, 8][number]], DOUBLE);
        pair.sharded.layer(number, inputs).map(drop)
    });
    let fits = matches!(&told, Err(ShardError::RanksDisagree { rank: 1, found, expected, .. })
        if found.contains("`layer2`") && expected.contains("`layer1`"));
    ensure!(fits, "{told:?}");
    pair.goes_on().context("after another order of units")?;

    // A rank steps while the others compute.
    let told = match rank {
        1 => pair.opt.step().map_err(|error| error.to_string()),
        _ => pair.sharded.forward(&data(9, 0, rank).0).map(drop).map_err(|error| error.to_string()),
    };
    ensure!(told.as_ref().is_err_and(|it| it.contains("the begin of an optimizer's step")), "{told:?}");
    pair.goes_on().context("after a step within a forward")?;
    written(&mut pair)?;
    outside(&mut pair)
}

/// A forward that writes to a whole parameter.
fn written(pair: &mut Pair) -> Result<()> {
    let rank = pair.group().rank();
    let mut builder = FullyShardedDataParallel::builder(pair.group())?;
    let weight = Tensor::ones([4, 4], DOUBLE).set_requires_grad(true);
    let unit = builder.unit("unit", [("weight", &weight)])?;
    let fsdp = builder.build([("weight", &weight)])?;
    let writes = |x: Tensor| {
        if rank == 1 {
            let _written = tch::no_grad(|| weight.shallow_clone().zero_());
        }
        x.matmul(&weight)
    };
    let told = unit.forward(Tensor::ones([1, 4], DOUBLE), writes).map(drop);
    match rank {
        1 => ensure!(told.as_ref().is_err_and(|it| it.to_string().contains("`weight`: it was written to")), "{told:?}"),
        _ => {
            ensure!(told.is_ok(), "nothing was exchanged since: {told:?}");
            let told = unit.forward(Tensor::ones([1, 4], DOUBLE), |x| x.matmul(&weight)).map(drop);
            is_of_rank_1(&told, "was written to")?;
        }
    }
    let outputs = unit.forward(Tensor::ones([1, 4], DOUBLE), |x| x.matmul(&weight))?;
    ensure!(outputs.double_value(&[0, 0]) == 4.0);
    fsdp.backward(&outputs.sum(Kind::Double))?;
    Ok(())
}

/// Whole parameters outside of their unit, and what relies on them.
fn outside(pair: &mut Pair) -> Result<()> {
    let rank = pair.group().rank();
    let inputs = data(0, 0, rank).0;
    let bias = pair.sharded.model.vs.variables()["layer1.bias"].shallow_clone();
    let told = bias.f_sum(Kind::Double).map(drop).expect_err("a sharded parameter was read");
    ensure!(told.to_string().contains("parameter `layer1.bias` is sharded"), "{told}");
    let told = catch_unwind(AssertUnwindSafe(|| pair.sharded.model.forward(&inputs)));
    ensure!(told.is_err(), "a forward outside of units");
    // A view that has left its unit.
    let mut escaped = Tensor::new();
    let _outputs = pair.sharded.fsdp.forward(inputs.shallow_clone(), |x| {
        escaped = pair.sharded.model.vs.variables()["layer0.weight"].transpose(0, 1);
        x.matmul(&escaped)
    })?;
    let _ = pair.sharded.fsdp.backward(&pair.sharded.loss(&data(0, 0, rank))?);
    pair.opt.zero_grad()?;
    let told = escaped.f_sum(Kind::Double).map(drop).expect_err("a view of a sharded parameter was read");
    ensure!(told.to_string().contains("`layer0.weight` is sharded"), "{told}");
    pair.goes_on().context("after a use outside")?;

    // `loss.backward()` in place of the model's.
    let loss = pair.sharded.loss(&data(0, 0, rank))?;
    let told = loss.f_backward().expect_err("a pass that does not average");
    ensure!(told.to_string().contains("call `backward` of the `FullyShardedDataParallel`"), "{told}");
    pair.opt.zero_grad()?;
    pair.goes_on().context("after `loss.backward()`")?;

    // An optimizer of whole parameters, the model's own state, and a norm of this rank's rows.
    let told = Sgd::builder(&pair.sharded.model.vs).lr(0.1).build().map(drop);
    let told = told.expect_err("an optimizer of whole parameters");
    ensure!(told.to_string().contains("make the optimizer by `optimizer`"), "{told}");
    let told = overdrive_core::Stateful::state_dict(&pair.sharded.model.vs).map(drop);
    ensure!(told.is_err_and(|it| it.to_string().contains("sharded over ranks")), "the model's own state");
    let told = clip_grad_norm_(pair.opt.parameters(), 1.0).map(drop);
    ensure!(told.is_err(), "a norm of this rank's rows alone");
    pair.goes_on()
}

pub fn backward_passes(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let (rank, mut pair) = (group.rank(), Pair::new(&group)?);
    pair.goes_on()?;

    // A loss without a graph on rank 1.
    let loss = pair.sharded.loss(&data(0, 0, rank))?;
    let told = pair.sharded.fsdp.backward(&if rank == 1 { Tensor::from(1.0) } else { loss });
    match rank {
        1 => ensure!(matches!(told, Err(ShardError::Torch(_))), "{told:?}"),
        _ => is_of_rank_1(&told, "does not require grad")?,
    }
    pair.goes_on().context("after a loss without a graph")?;

    // The same where gradients are held back.
    let held = pair.sharded.fsdp.no_sync();
    let loss = pair.sharded.loss(&data(0, 0, rank))?;
    let told = pair.sharded.fsdp.backward(&if rank == 1 { Tensor::from(1.0) } else { loss });
    ensure!(told.is_err(), "a pass that holds back is one of all ranks too");
    drop(held);
    pair.goes_on().context("after a pass that held back")?;

    // A panic in a pass that the program runs.
    let loss = pair.sharded.loss(&data(0, 0, rank))?;
    let run = || {
        pair.sharded.fsdp.backward_with(|| {
            assert!(rank != 1, "a panic of the test");
            Ok(loss.f_backward()?)
        })
    };
    match (rank, catch_unwind(AssertUnwindSafe(run))) {
        (1, told) => ensure!(told.is_err(), "it was swallowed"),
        (_, told) => is_of_rank_1(&told.unwrap_or(Ok(())), "has panicked")?,
    }
    pair.goes_on().context("after a panic in a backward pass")?;

    // A step with gradients that were not exchanged.
    let held = pair.sharded.fsdp.no_sync();
    pair.sharded.fsdp.backward(&pair.sharded.loss(&data(0, 0, rank))?)?;
    drop(held);
    let told = pair.opt.step().expect_err("gradients of this rank alone");
    ensure!(told.to_string().contains("have left gradients local"), "{told}");
    pair.opt.zero_grad()?;
    pair.goes_on().context("after local gradients")?;

    // Held back on rank 1 alone.
    let held = (rank == 1).then(|| pair.sharded.fsdp.no_sync());
    let told = pair.sharded.fsdp.backward(&pair.sharded.loss(&data(0, 0, rank))?);
    ensure!(matches!(told, Err(ShardError::RanksDisagree { rank: 1, .. })), "{told:?}");
    drop(held);
    pair.goes_on().context("after a pass that one rank held back")?;

    // Gradients are zeroed on rank 1 alone, within a window.
    let held = pair.sharded.fsdp.no_sync();
    pair.sharded.fsdp.backward(&pair.sharded.loss(&data(0, 0, rank))?)?;
    drop(held);
    if rank == 1 {
        pair.opt.zero_grad()?;
    }
    let told = pair.sharded.fsdp.backward(&pair.sharded.loss(&data(0, 0, rank))?);
    ensure!(matches!(&told, Err(ShardError::RanksDisagree { rank: 1, .. })), "{told:?}");
    if rank != 1 {
        pair.opt.zero_grad()?;
    }
    pair.goes_on().context("after a window that one rank began anew")?;

    // A graph that is kept over a step has saved the old values.
    let loss = pair.sharded.loss(&data(0, 0, rank))?;
    let options = GradOptions { retain_graph: true, ..GradOptions::default() };
    pair.sharded.fsdp.backward_with(|| backward::<Tensor>(&[&loss], &[], options))?;
    pair.opt.step()?;
    let told = pair.sharded.fsdp.backward(&loss).expect_err("a graph with other values");
    ensure!(told.to_string().contains("changed after the forward"), "{told}");
    Ok(())
}

/// A step that fails on one rank, sparse gradients, and a scaler.
pub fn steps(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    let (rank, mut pair) = (group.rank(), Pair::new(&group)?);
    pair.goes_on()?;
    // The rows of a parameter were frozen on rank 1 alone: its gradient does not fit.
    pair.sharded.fsdp.backward(&pair.sharded.loss(&data(0, 0, rank))?)?;
    let extra = Tensor::ones([2], DOUBLE).set_requires_grad(true);
    let mut inner = Sgd::builder(pair.sharded.fsdp.parameters()).lr(0.1).build()?;
    if rank == 1 {
        inner.add_param_group(Sgd::group([("extra", extra)]))?;
    }
    let told = pair.sharded.fsdp.optimizer(|_| Ok(inner)).map(drop);
    match rank {
        1 => ensure!(matches!(&told, Err(ShardError::Optimizer(OptimizerError::DoesNotFit { .. }))), "{told:?}"),
        _ => is_of_rank_1(&told, "other parameters than it was given")?,
    }
    let mut other = pair.sharded.fsdp.optimizer(|params| Sgd::builder(params).lr(0.1).build())?;
    if rank == 1 {
        let added = Tensor::ones([2], DOUBLE).set_requires_grad(true);
        other.inner_mut().add_param_group(Sgd::group([("added", added)]))?;
    }
    let told = other.step().expect_err("a step of rank 1 fails");
    let text = "parameters were added to the optimizer inside";
    ensure!(told.to_string().contains(text), "{told}");
    pair.opt.zero_grad()?;
    pair.goes_on().context("after a step that failed")?;

    let last = rank + 1 == group.size();
    let table = Tensor::ones([6, 2], DOUBLE).set_requires_grad(true);
    let fsdp = FullyShardedDataParallel::builder(&group)?.build([("table", &table)])?;
    let loss = |sparse: bool| {
        let rows = Tensor::from_slice(&[1i64, 3]);
        fsdp.forward(rows, |rows| Tensor::embedding(&table, &rows, -1, false, sparse)).map(|it| it.sum(Kind::Double))
    };
    let told = fsdp.backward(&loss(last)?).expect_err("a sparse gradient");
    ensure!(told.to_string().contains("`table`: its gradient is sparse"), "{told}");
    fsdp.backward(&loss(false)?)?;
    let sum = fsdp.parameters()[0].tensor().grad().sum(Kind::Double).double_value(&[]);
    let sums = group.all_gather_object(&sum)?;
    ensure!(sums.iter().sum::<f64>() == 4.0, "{sums:?}");

    // An infinity of one rank: all skip the step, and lower the scale.
    let mut scaler = GradScaler::builder(Device::Cpu).init_scale(64.0).build()?;
    for step in 0..4 {
        let before: Vec<Tensor> = pair.opt.params().iter().map(Tensor::copy).collect();
        let is_bad = step % 2 == 1;
        let factor = if is_bad && rank == step % group.size() { f64::INFINITY } else { 1.0 };
        let loss = pair.sharded.loss(&data(step, 0, rank))? * factor;
        pair.sharded.fsdp.backward(&scaler.scale(&loss)?)?;
        scaler.unscale_(&mut pair.opt)?;
        pair.sharded.fsdp.clip_grad_norm_(1.0)?;
        let skipped = scaler.step(&mut pair.opt)?.skipped()?;
        scaler.update()?;
        pair.opt.zero_grad()?;
        let is_same = pair.opt.params().iter().zip(&before).all(|(one, other)| one.equal(other));
        ensure!(skipped == is_bad && is_same == is_bad, "step {step}: {skipped}");
        let scales = group.all_gather_object(&scaler.scale_value()?)?;
        ensure!(scales.iter().all(|scale| *scale == [64.0, 32.0, 32.0, 16.0][step]), "{scales:?}");
    }
    close(&[], &[])
}
