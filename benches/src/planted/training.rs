//! Shared by the loops: a step timer that records, a model with its optimizer, and a training step in phases.

use std::time::Duration;

use anyhow::Result;
use overdrive::prelude::*;
use overdrive_profile::{Phase, RunRecorder, StepTimer};
use tch::nn::VarStore;

use super::Plan;
use crate::model::{Mlp, cross_entropy};

/// A forward pass, from inputs to logits.
pub type Model = Box<dyn Fn(&Tensor) -> Tensor>;

/// A timer that records as the plan says. It samples the machine every 50 ms, because runs are short.
pub fn start_timer(plan: &Plan, device: Device) -> Result<StepTimer> {
    let recorder = RunRecorder::new()
        .steps_before(plan.steps)
        .profiled_steps(plan.profiled_steps)
        .sample_interval(Duration::from_millis(50));
    Ok(StepTimer::builder().device(device).warmup_steps(plan.warmup_steps).record(recorder).build()?)
}

/// Random inputs, each of the given shape, and random targets of ten classes.
pub fn batch(samples: i64, shape: &[i64]) -> (Tensor, Tensor) {
    let inputs = Tensor::randn([&[samples][..], shape].concat(), (Kind::Float, Device::Cpu));
    (inputs, Tensor::randint(10, [samples], (Kind::Int64, Device::Cpu)))
}

/// A model with its optimizer.
pub struct Trainer {
    model: Model,
    opt: AdamW,
}

impl Trainer {
    /// A model whose variables are in `vs`.
    pub fn new(vs: &VarStore, model: impl Fn(&Tensor) -> Tensor + 'static) -> Result<Self> {
        let opt = AdamW::builder(vs.trainable_variables()).lr(1e-3).fused(true).build()?;
        Ok(Self { model: Box::new(model), opt })
    }

    /// An MLP with the given widths.
    pub fn mlp(device: Device, widths: &[i64]) -> Result<Self> {
        let vs = VarStore::new(device);
        let mlp = Mlp::new(&vs.root(), widths);
        Self::new(&vs, move |inputs| mlp.forward(inputs))
    }

    /// The logits. The caller sets the phase.
    pub fn forward(&self, inputs: &Tensor) -> Tensor {
        (self.model)(inputs)
    }

    /// The backward pass and the optimizer's step, each in its phase.
    pub fn learn(&mut self, timer: &StepTimer, loss: &Tensor) -> Result<()> {
        {
            let _phase = timer.phase(Phase::Backward);
            loss.f_backward()?;
        }
        let _phase = timer.phase(Phase::Optimizer);
        self.opt.step()?;
        Ok(self.opt.zero_grad()?)
    }

    /// A whole training step on a batch.
    pub fn step(&mut self, timer: &StepTimer, inputs: &Tensor, targets: &Tensor) -> Result<()> {
        let loss = {
            let _phase = timer.phase(Phase::Forward);
            cross_entropy(&self.forward(inputs), targets)
        };
        self.learn(timer, &loss)?;
        timer.step(inputs.size()[0] as u64);
        Ok(())
    }
}
