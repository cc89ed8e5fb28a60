//! The model and the optimizers, written as formulas.

use anyhow::Result;
use overdrive::optim::{AdamWScheduleFree, Joint, Lamb, Muon, Prodigy};
use overdrive::prelude::*;
use overdrive::sched::Scheduler;

use crate::choices::{Cell, Opt};

pub const SGD_LR: f64 = 0.05;
pub const ADAMW_LR: f64 = 0.05;
pub const MUON_LR: f64 = 0.02;
pub const LAMB_LR: f64 = 0.05;
pub const LAMB_NORM: f64 = 0.4;
pub const MOMENTUM: f64 = 0.9;
pub const PRODIGY_D0: f64 = 1e-3;
pub const LOOKAHEAD: (u32, f64) = (2, 0.5);

/// The model's outputs; parameters in the order of `NAMES`.
pub fn model(params: &[Tensor], inputs: &Tensor) -> Tensor {
    let kind = params[0].kind();
    let hidden = (inputs.to_kind(kind).matmul(&params[0].tr()) + &params[1]).tanh();
    hidden.matmul(&params[2].tr()) + &params[3]
}

/// The 2-norm of all gradients as one vector.
pub fn norm(gradients: &[Tensor]) -> f64 {
    gradients.iter().map(|it| it.square().sum(Kind::Double).double_value(&[])).sum::<f64>().sqrt()
}

enum Rule {
    Sgd {
        momentum: f64,
        buffers: Vec<Option<Tensor>>,
    },
    AdamW {
        beta1: f64,
        weight_decay: f64,
        averages: Vec<Option<(Tensor, Tensor, f64)>>,
    },
    /// Our optimizer, which other tests compare with the reference implementation; here it runs without the other
    /// parts. So do the others below.
    Lamb(Lamb),
    Joint(Joint<Muon, AdamW>),
    Other(Box<dyn Optimizer>),
}

impl Rule {
    fn ours(&mut self) -> Option<&mut dyn Optimizer> {
        match self {
            Self::Lamb(lamb) => Some(lamb),
            Self::Joint(joint) => Some(joint),
            Self::Other(opt) => Some(opt),
            _ => None,
        }
    }
}

/// An optimizer's rule, its rates by group, and the slow weights of Lookahead around it.
pub struct Formula {
    rule: Rule,
    rates: Vec<f64>,
    /// The index of the second group's first parameter, if there is one.
    second_from: usize,
    looks_ahead: bool,
    slow: Vec<Tensor>,
    steps: u32,
}

impl Formula {
    pub fn of(cell: &Cell, params: &[Tensor]) -> Result<Self> {
        let sgd = || Rule::Sgd { momentum: MOMENTUM, buffers: Vec::new() };
        let adamw = |weight_decay| Rule::AdamW { beta1: 0.9, weight_decay, averages: Vec::new() };
        let (rule, rates) = match cell.optimizer {
            Opt::Sgd | Opt::Tch | Opt::Masters | Opt::Sam | Opt::SamLookahead => (sgd(), vec![SGD_LR]),
            Opt::AdamW | Opt::InBackward | Opt::Lookahead | Opt::Offloaded => (adamw(0.01), vec![ADAMW_LR]),
            Opt::OneBit => (adamw(0.0), vec![ADAMW_LR]),
            Opt::Lamb => {
                let lamb = Lamb::builder(params).lr(LAMB_LR).max_grad_norm(Some(LAMB_NORM)).build()?;
                (Rule::Lamb(lamb), vec![LAMB_LR])
            }
            Opt::ScheduleFree => {
                (Rule::Other(Box::new(AdamWScheduleFree::builder(params).lr(ADAMW_LR).build()?)), vec![ADAMW_LR])
            }
            Opt::Prodigy => (Rule::Other(Box::new(Prodigy::builder(params).d0(PRODIGY_D0).build()?)), vec![1.0]),
            Opt::Joint => {
                let muon = Muon::builder([params[0].shallow_clone()]).lr(MUON_LR).build()?;
                let joint = Joint::new(muon, AdamW::builder(&params[1..]).lr(ADAMW_LR).build()?)?;
                (Rule::Joint(joint), vec![MUON_LR, ADAMW_LR])
            }
        };
        let looks_ahead = matches!(cell.optimizer, Opt::Lookahead | Opt::SamLookahead);
        let second_from = if cell.optimizer == Opt::Joint { 1 } else { params.len() };
        Ok(Self { rule, rates, second_from, looks_ahead, slow: Vec::new(), steps: 0 })
    }

    pub fn rates(&self) -> Vec<f64> {
        self.rates.clone()
    }

    pub fn set_rates(&mut self, schedule: &Scheduler) -> Result<()> {
        self.rates = schedule.last_lr().to_vec();
        for (group, rate) in self.rates.iter().enumerate() {
            let cycled = schedule.momentum(group);
            match &mut self.rule {
                Rule::Sgd { momentum, .. } => *momentum = cycled.unwrap_or(*momentum),
                Rule::AdamW { beta1, .. } => *beta1 = cycled.unwrap_or(*beta1),
                _ => {}
            }
            if let Some(opt) = self.rule.ours() {
                opt.set_lr(group, *rate)?;
                cycled.map_or(Ok(()), |momentum| opt.set_momentum(group, momentum))?;
            }
        }
        Ok(())
    }

    /// Adds a parameter group with the first one's options.
    pub fn add(&mut self, param: &Tensor) -> Result<()> {
        self.rates.push(self.rates[0]);
        if let Rule::Lamb(lamb) = &mut self.rule {
            lamb.add_param_group(Lamb::group([param.shallow_clone()]))?;
        }
        Ok(())
    }

    pub fn step(&mut self, params: &[Tensor], gradients: &[Tensor]) -> Result<()> {
        if self.looks_ahead && self.slow.is_empty() {
            self.slow = params.iter().map(Tensor::detach_copy).collect();
        }
        if let Some(opt) = self.rule.ours() {
            let products = params.iter().zip(gradients).map(|(param, gradient)| (param * gradient).sum(Kind::Double));
            products.reduce(|one, other| one + other).iter().for_each(Tensor::backward);
            opt.step()?;
            opt.zero_grad()?;
        } else {
            tch::no_grad(|| params.iter().zip(gradients).enumerate().for_each(|(index, it)| self.step_one(index, it)));
        }
        self.steps += 1;
        if self.looks_ahead && self.steps.is_multiple_of(LOOKAHEAD.0) {
            tch::no_grad(|| {
                for (slow, param) in self.slow.iter_mut().zip(params) {
                    *slow = &*slow + (param - &*slow) * LOOKAHEAD.1;
                    param.shallow_clone().copy_(slow);
                }
            });
        }
        Ok(())
    }

    fn step_one(&mut self, index: usize, (param, gradient): (&Tensor, &Tensor)) {
        let rate = self.rates[usize::from(index >= self.second_from)];
        let mut param = param.shallow_clone();
        match &mut self.rule {
            Rule::Sgd { momentum, buffers } => {
                buffers.resize_with(buffers.len().max(index + 1), || None);
                let buffer = match &buffers[index] {
                    Some(buffer) => buffer * *momentum + gradient,
                    None => gradient.copy(),
                };
                param -= &buffer * rate;
                buffers[index] = Some(buffer);
            }
            Rule::AdamW { beta1, weight_decay, averages } => {
                averages.resize_with(averages.len().max(index + 1), || None);
                let zeros = || (gradient.zeros_like(), gradient.zeros_like(), 0.0);
                let (mean, square, steps) = averages[index].take().unwrap_or_else(zeros);
                let mean = mean * *beta1 + gradient * (1.0 - *beta1);
                let square = square * 0.999 + gradient.square() * 0.001;
                let steps = steps + 1.0;
                param *= 1.0 - rate * *weight_decay;
                let root = (&square / (1.0 - 0.999f64.powf(steps))).sqrt() + 1e-8;
                param -= &mean / root * (rate / (1.0 - beta1.powf(steps)));
                averages[index] = Some((mean, square, steps));
            }
            _ => {}
        }
    }
}
