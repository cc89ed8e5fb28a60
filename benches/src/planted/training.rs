//! What the loops share: a timer that records, a model with its optimizer, a step in phases.

use std::time::Duration;

use anyhow::Result;
use overdrive::prelude::*;
use overdrive_profile::{Phase, RunRecorder, StepTimer};
use tch::nn::VarStore;

use super::Plan;
use crate::model::{Mlp, cross_entropy};

/// From inputs to logits.
pub type Model = Box<dyn Fn(&Tensor) -> Tensor>;

/// A timer that records as the plan says. The machine is looked at often, because runs are short.
pub fn start_timer(plan: &Plan, device: Device) -> Result<StepTimer> {
    let recorder = RunRecorder::new()
        .steps_before(plan.steps)
        .profiled_steps(plan.profiled_steps)
        .sample_interval(Duration::from_millis(50));
    Ok(StepTimer::builder().device(device).warmup_steps(plan.warmup_steps).record(recorder).build()?)
}

/// Inputs of the given shape and ten classes, made up.
pub fn batch(samples: i64, shape: &[i64]) -> (Tensor, Tensor) {
    let inputs = Tensor::randn([&[samples][..], shape].concat(), (Kind::Float, Device::Cpu));
    (inputs, Tensor::randint(10, [samples], (Kind::Int64, Device::Cpu)))
}

/// A model and what trains it.
pub struct Trainer {
    model: Model,
    opt: AdamW,
}

impl Trainer {
    /// Trains the variables of a store.
    pub fn new(vs: &VarStore, model: impl Fn(&Tensor) -> Tensor + 'static) -> Result<Self> {
        let opt = AdamW::builder(vs.trainable_variables()).lr(1e-3).fused(true).build()?;
        Ok(Self { model: Box::new(model), opt })
    }

    /// A perceptron.
    pub fn mlp(device: Device, widths: &[i64]) -> Result<Self> {
        let vs = VarStore::new(device);
        let mlp = Mlp::new(&vs.root(), widths);
        Self::new(&vs, move |inputs| mlp.forward(inputs))
    }

    /// The logits; the phase is the caller's.
    pub fn forward(&self, inputs: &Tensor) -> Tensor {
        (self.model)(inputs)
    }

    /// From a loss to new parameters.
    pub fn learn(&mut self, timer: &StepTimer, loss: &Tensor) -> Result<()> {
        {
            let _phase = timer.phase(Phase::Backward);
            loss.f_backward()?;
        }
        let _phase = timer.phase(Phase::Optimizer);
        self.opt.step()?;
        Ok(self.opt.zero_grad()?)
    }

    /// A whole step, but for where the batch comes from.
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
