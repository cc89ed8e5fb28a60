//! Optimizers that step during the backward pass, under DDP, compared with one process with the large batch.

use anyhow::{Result, ensure};
use overdrive::optim::{Joint, SgdBuilder};
use overdrive::prelude::*;
use overdrive_ddp::{DdpError, DistributedDataParallel, ProcessGroup};
use tch::nn::{self, Module};

use crate::harness::Meeting;

const DOUBLE: (Kind, Device) = (Kind::Double, Device::Cpu);
const STEPS: i64 = 8;
/// Samples per rank.
const BATCH: i64 = 6;

struct Run {
    vs: nn::VarStore,
    model: nn::Sequential,
}

impl Run {
    fn new() -> Self {
        tch::manual_seed(7);
        let mut vs = nn::VarStore::new(Device::Cpu);
        let model = nn::seq()
            .add(nn::linear(vs.root() / "in", 5, 9, Default::default()))
            .add_fn(Tensor::tanh)
            .add(nn::linear(vs.root() / "out", 9, 2, Default::default()));
        vs.double();
        Self { vs, model }
    }

    fn options(&self) -> SgdBuilder {
        Sgd::builder(self.vs.trainable_variables()).lr(0.1).momentum(0.9)
    }

    fn loss(&self, (x, y): &(Tensor, Tensor)) -> Tensor {
        (self.model.forward(x) - y).square().mean(Kind::Double)
    }
}

/// The batch of all ranks in a step, and this rank's part.
fn batches(group: &ProcessGroup, step: i64) -> [(Tensor, Tensor); 2] {
    tch::manual_seed(100 + step);
    let ranks = group.size() as i64;
    let (x, y) = (Tensor::randn([BATCH * ranks, 5], DOUBLE), Tensor::randn([BATCH * ranks, 2], DOUBLE));
    let own = |all: &Tensor| all.narrow(0, group.rank() as i64 * BATCH, BATCH);
    let mine = (own(&x), own(&y));
    [(x, y), mine]
}

fn trains_as_the_large_batch(group: &ProcessGroup, optimizer_first: bool, view: bool, accumulates: bool) -> Result<()> {
    let (ours, reference) = (Run::new(), Run::new());
    let builder = DistributedDataParallel::builder(group).gradient_as_bucket_view(view);
    let (mut opt, ddp) = if optimizer_first {
        let opt = ours.options().build_in_backward()?;
        (opt, builder.build(&ours.vs)?)
    } else {
        let ddp = builder.build(&ours.vs)?;
        (ours.options().build_in_backward()?, ddp)
    };
    let mut expected = reference.options().build()?;
    for step in 0..STEPS {
        let held = accumulates && step % 2 == 0;
        let [all, own] = batches(group, step);
        let _local = held.then(|| ddp.no_sync());
        let loss = ddp.forward(|| ours.loss(&own))?;
        let before = ours.vs.trainable_variables()[0].copy();
        ddp.backward(&loss)?;
        ensure!(
            held == ours.vs.trainable_variables()[0].equal(&before),
            "step {step}: stepped while local, or not at all"
        );
        opt.step()?;
        reference.loss(&all).backward();
        if !held {
            expected.step()?;
            expected.zero_grad()?;
        }
    }
    for (ours, reference) in ours.vs.trainable_variables().iter().zip(reference.vs.trainable_variables()) {
        let error = (ours - reference).abs().max().double_value(&[]);
        ensure!(error < 1e-12, "off by {error}");
        ensure!(!ours.grad().defined(), "the gradients are freed");
    }
    Ok(())
}

/// A parameter made after the wrapping would be stepped with each rank's own gradient.
fn refuses_what_is_not_averaged(group: &ProcessGroup) -> Result<()> {
    let run = Run::new();
    let mut opt = run.options().build_in_backward()?;
    let ddp = DistributedDataParallel::new(&run.vs, group)?;
    let twice = DistributedDataParallel::new(&run.vs, group).map(drop);
    ensure!(matches!(&twice, Err(DdpError::WrappedTwice { name }) if name == "in.bias"), "{twice:?}");
    let scale = run.vs.root().ones("scale", &[1]).to_kind(Kind::Double).detach().set_requires_grad(true);
    opt.add_param_group(Sgd::group([&scale]))?;
    let [_, own] = batches(group, 0);
    let loss = ddp.forward(|| run.loss(&own) * &scale)?;
    ddp.backward(&loss.sum(Kind::Double))?;
    let told = opt.step().err().map(|error| error.to_string()).unwrap_or_default();
    ensure!(told.contains("its gradient is not averaged over the ranks"), "{told}");
    ensure!(scale.double_value(&[0]) == 1.0, "it was stepped");
    drop((opt, ddp));

    // Two wrappings: an error until one is dropped, then the other one's averages are used.
    let run = Run::new();
    let ddp = DistributedDataParallel::new(&run.vs, group)?;
    let other = DistributedDataParallel::new(&run.vs, group)?;
    let told = run.options().build_in_backward().map(drop).err().map(|error| error.to_string()).unwrap_or_default();
    ensure!(told.contains("several `DistributedDataParallel`s"), "{told}");
    drop(other);
    let mut opt = run.options().build_in_backward()?;
    let loss = ddp.forward(|| run.loss(&own))?;
    ddp.backward(&loss)?;
    opt.step()?;
    let weights = Tensor::cat(&run.vs.trainable_variables().iter().map(|it| it.reshape([-1])).collect::<Vec<_>>(), 0);
    let all = group.all_gather(&weights.detach())?;
    ensure!(all.iter().all(|of_rank| of_rank == &all[0]), "the ranks' weights differ");
    drop((opt, ddp));

    // A joint optimizer, one half of which has a parameter made after the wrapping.
    let run = Run::new();
    let ddp = DistributedDataParallel::new(&run.vs, group)?;
    let mut opt = Joint::new(run.options().build()?, Sgd::builder([&scale]).build()?)?;
    let loss = ddp.forward(|| run.loss(&own) * &scale)?;
    ddp.backward(&loss.sum(Kind::Double))?;
    let told = opt.step().err().map(|error| error.to_string()).unwrap_or_default();
    ensure!(told.contains("its gradient is not averaged over the ranks"), "{told}");
    Ok(())
}

/// An ignored parameter gets the gradient of its own rank's window.
fn accumulates_with_ignored_parameters(group: &ProcessGroup) -> Result<()> {
    let run = Run::new();
    let scale = run.vs.root().var("scale", &[1], nn::Init::Const(1.0));
    let ddp = DistributedDataParallel::builder(group).ignore(["scale"]).build(&run.vs)?;
    let mut opt = Sgd::builder(run.vs.trainable_variables()).lr(0.1).build()?;
    let mut accum = Accumulator::new(2)?.with_sync(&ddp);
    let mut expected = 1.0;
    for step in 0..2 {
        let [_, own] = batches(group, step);
        let loss = ddp.forward(|| run.loss(&own))?;
        expected -= 0.1 * loss.double_value(&[]) / 2.0;
        accum.backward(&opt, &(loss * &scale).sum(Kind::Double), Samples(BATCH), step == 1)?;
    }
    opt.step()?;
    let found = scale.double_value(&[0]);
    ensure!((found - expected).abs() < 1e-6, "{found}, not {expected}");
    let all = group.all_gather(&Tensor::from(found))?;
    ensure!(all[0] != all[1], "the ignored parameters should differ by rank: {all:?}");
    Ok(())
}

pub fn scenario(meeting: &Meeting) -> Result<()> {
    let group = meeting.group()?;
    accumulates_with_ignored_parameters(&group)?;
    refuses_what_is_not_averaged(&group)?;
    for case in 0..8 {
        let [optimizer_first, view, accumulates] = [1, 2, 4].map(|bit| case & bit != 0);
        trains_as_the_large_batch(&group, optimizer_first, view, accumulates).map_err(|error| {
            let options = (optimizer_first, view, accumulates);
            error.context(format!("optimizer first, gradients as views, accumulation: {options:?}"))
        })?;
    }
    Ok(())
}
