//! Loops on several ranks, over Gloo.

use std::time::Duration;

use anyhow::Result;
use overdrive::prelude::*;
use overdrive_ddp::{Backend, DistributedDataParallel, InitMethod, ModelAverager, ProcessGroup};
use overdrive_profile::{Phase, RunProfile, StepTimer, record_function};
use tch::nn::VarStore;

use super::training::{Model, batch, start_timer};
use super::{Form, Plan};
use crate::model::{Cnn, Mlp, cross_entropy};

/// How long a rank waits for the others at most.
const TIMEOUT: Duration = Duration::from_secs(60);

/// Rank 1 does two extra forward passes per step, so the other rank waits for it. Remedied: it does not.
pub fn straggler(form: Form, plan: &Plan) -> Result<RunProfile> {
    let group = init_group()?;
    let extra_passes = if form == Form::Planted && group.rank() == 1 { 2 } else { 0 };
    let vs = VarStore::new(Device::Cpu);
    let cnn = Cnn::new(&vs.root());
    let model = move |images: &Tensor| {
        no_grad(|| {
            let _scope = record_function("more passes");
            (0..extra_passes).for_each(|_| drop(cnn.forward(images)));
        });
        cnn.forward(images)
    };
    Rank::new(group, &vs, Box::new(model))?.train(plan, batch(16, &[1, 28, 28]))
}

/// A CNN that computes long enough between two all-reduces of 0.4 MB of gradients.
pub fn healthy_cnn(_: Form, plan: &Plan) -> Result<RunProfile> {
    let vs = VarStore::new(Device::Cpu);
    let cnn = Cnn::new(&vs.root());
    Rank::new(init_group()?, &vs, Box::new(move |images| cnn.forward(images)))?.train(plan, batch(64, &[1, 28, 28]))
}

/// 7.5 MB of gradients are all-reduced after every batch of 96 samples. Remedied: ranks train alone, and average their
/// parameters every 16 steps. The diagnosis' bound is for a run without communication; here a sixteenth of it is left.
pub fn large_all_reduce(form: Form, plan: &Plan) -> Result<RunProfile> {
    const PERIOD: u64 = 16;
    let vs = VarStore::new(Device::Cpu);
    let mlp = Mlp::new(&vs.root(), &[784, 1024, 1024, 10]);
    let mut rank = Rank::new(init_group()?, &vs, Box::new(move |inputs| mlp.forward(inputs)))?;
    if form == Form::Remedied {
        rank.averager = Some(ModelAverager::new(rank.ddp.group(), &vs.trainable_variables(), PERIOD, 0)?);
    }
    rank.train(plan, batch(96, &[784]))
}

fn init_group() -> Result<ProcessGroup> {
    Ok(ProcessGroup::builder(Backend::Gloo).timeout(TIMEOUT).init(&InitMethod::Auto)?)
}

/// A model on one rank.
struct Rank {
    model: Model,
    ddp: DistributedDataParallel,
    opt: AdamW,
    /// Averages parameters every few steps, if there is one; otherwise gradients are averaged in every step.
    averager: Option<ModelAverager>,
}

impl Rank {
    fn new(group: ProcessGroup, vs: &VarStore, model: Model) -> Result<Self> {
        let ddp = DistributedDataParallel::new(vs, &group)?;
        let opt = AdamW::builder(vs.trainable_variables()).lr(1e-3).fused(true).build()?;
        Ok(Self { model, ddp, opt, averager: None })
    }

    fn train(mut self, plan: &Plan, (inputs, targets): (Tensor, Tensor)) -> Result<RunProfile> {
        let timer = start_timer(plan, Device::Cpu)?;
        for _ in 0..plan.all_steps() {
            self.step(&timer, &inputs, &targets)?;
        }
        let run = timer.finish()?;
        // Rank 0 holds the store, which the others need until they are done.
        self.ddp.group().barrier()?;
        Ok(run)
    }

    fn step(&mut self, timer: &StepTimer, inputs: &Tensor, targets: &Tensor) -> Result<()> {
        {
            let _no_sync = self.averager.is_some().then(|| self.ddp.no_sync());
            let loss = {
                let _phase = timer.phase(Phase::Forward);
                cross_entropy(&self.ddp.forward(|| (self.model)(inputs))?, targets)
            };
            let _phase = timer.phase(Phase::Backward);
            self.ddp.backward(&loss)?;
        }
        {
            let _phase = timer.phase(Phase::Optimizer);
            self.opt.step()?;
            self.opt.zero_grad()?;
        }
        if let Some(averager) = &mut self.averager {
            let _phase = timer.phase(Phase::Communication);
            averager.average_parameters()?;
        }
        timer.step(inputs.size()[0] as u64);
        Ok(())
    }
}
