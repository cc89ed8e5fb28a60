//! Optimizers over 1,000 steps, with the options that Python has chosen.

use anyhow::{Result, ensure};
use overdrive_core::Optimizer;
use overdrive_optim::{
    Adadelta, Adafactor, AdafactorForm, Adagrad, AdagradBuilder, Adam, AdamOptions, AdamW, Adamax, AdjustLr, Asgd,
    GroupBuilder, Lamb, Lars, LarsForm, Lion, Muon, NAdam, RAdam, RmsProp, Rprop, Sgd, SgdBuilder, SparseAdam,
};
use serde::Deserialize;
use tch::Tensor;

use crate::record::{Found, Given};

/// Options under PyTorch's names. Options that Python leaves out keep our defaults, so that the defaults are compared
/// too.
#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct Config {
    adaptive: Option<bool>,
    adjust_lr_fn: Option<String>,
    alpha: Option<f64>,
    always_adapt: Option<bool>,
    amsgrad: Option<bool>,
    beta2_decay: Option<f64>,
    betas: Option<(f64, f64)>,
    centered: Option<bool>,
    d: Option<f64>,
    dampening: Option<f64>,
    decay_rate: Option<f64>,
    decoupled_weight_decay: Option<bool>,
    eps: Option<Eps>,
    etas: Option<(f64, f64)>,
    initial_accumulator_value: Option<f64>,
    lambd: Option<f64>,
    lr: Option<f64>,
    lr_decay: Option<f64>,
    max_grad_norm: Option<f64>,
    maximize: Option<bool>,
    momentum: Option<f64>,
    momentum_decay: Option<f64>,
    nesterov: Option<bool>,
    ns_coefficients: Option<(f64, f64, f64)>,
    ns_steps: Option<i64>,
    rho: Option<f64>,
    step_sizes: Option<(f64, f64)>,
    t0: Option<f64>,
    trust_clip: Option<bool>,
    trust_coefficient: Option<f64>,
    warmup_init: Option<bool>,
    weight_decay: Option<f64>,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(untagged)]
enum Eps {
    One(f64),
    Two(Option<f64>, f64),
}

impl Eps {
    fn one(self) -> f64 {
        match self {
            Self::One(eps) | Self::Two(_, eps) => eps,
        }
    }
}

/// Sets an option if there is a value.
fn set<B, T>(builder: B, value: Option<T>, set_option: impl FnOnce(B, T) -> B) -> B {
    match value {
        Some(value) => set_option(builder, value),
        None => builder,
    }
}

type Made = Result<Box<dyn Optimizer>>;

fn either_adam<const W: bool>(params: GroupBuilder<AdamOptions<W>>, c: &Config, fused: bool) -> Made {
    let opt = set(params.fused(fused), c.lr, GroupBuilder::lr);
    let opt = set(opt, c.betas, |opt, betas| opt.betas(betas.0, betas.1));
    let opt = set(opt, c.eps.map(Eps::one), GroupBuilder::<AdamOptions<W>>::eps);
    let opt = set(opt, c.weight_decay, GroupBuilder::<AdamOptions<W>>::weight_decay);
    let opt = set(opt, c.amsgrad, GroupBuilder::<AdamOptions<W>>::amsgrad);
    Ok(Box::new(set(opt, c.maximize, GroupBuilder::<AdamOptions<W>>::maximize).build()?))
}

pub fn adam(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, fused| either_adam(Adam::builder(params), c, fused))
}

pub fn adamw(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, fused| either_adam(AdamW::builder(params), c, fused))
}

pub fn sgd(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, fused| {
        let opt = set(Sgd::builder(params).fused(fused), c.lr, GroupBuilder::lr);
        let opt = set(opt, c.momentum, SgdBuilder::momentum);
        let opt = set(opt, c.dampening, SgdBuilder::dampening);
        let opt = set(opt, c.weight_decay, SgdBuilder::weight_decay);
        let opt = set(opt, c.nesterov, SgdBuilder::nesterov);
        Ok(Box::new(set(opt, c.maximize, SgdBuilder::maximize).build()?))
    })
}

pub fn rmsprop(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        let opt = set(RmsProp::builder(params), c.lr, GroupBuilder::lr);
        let opt = set(opt, c.alpha, |opt, alpha| opt.alpha(alpha));
        let opt = set(opt, c.eps.map(Eps::one), |opt, eps| opt.eps(eps));
        let opt = set(opt, c.weight_decay, |opt, decay| opt.weight_decay(decay));
        let opt = set(opt, c.momentum, |opt, momentum| opt.momentum(momentum));
        let opt = set(opt, c.centered, |opt, centered| opt.centered(centered));
        Ok(Box::new(set(opt, c.maximize, |opt, maximize| opt.maximize(maximize)).build()?))
    })
}

pub fn adagrad(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, fused| {
        let opt = set(Adagrad::builder(params).fused(fused), c.lr, GroupBuilder::lr);
        let opt = set(opt, c.lr_decay, AdagradBuilder::lr_decay);
        let opt = set(opt, c.eps.map(Eps::one), AdagradBuilder::eps);
        let opt = set(opt, c.weight_decay, AdagradBuilder::weight_decay);
        let opt = set(opt, c.initial_accumulator_value, AdagradBuilder::initial_accumulator_value);
        Ok(Box::new(set(opt, c.maximize, AdagradBuilder::maximize).build()?))
    })
}

pub fn adafactor(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        let opt = set(Adafactor::builder(params), c.lr, GroupBuilder::lr);
        let opt = set(opt, c.beta2_decay, |opt, decay| opt.beta2_decay(decay));
        let opt = set(opt, c.eps, |opt, eps| match eps {
            Eps::One(eps2) => opt.eps(None, eps2),
            Eps::Two(eps1, eps2) => opt.eps(eps1, eps2),
        });
        let opt = set(opt, c.d, |opt, d| opt.d(d));
        let opt = set(opt, c.weight_decay, |opt, decay| opt.weight_decay(decay));
        Ok(Box::new(set(opt, c.maximize, |opt, maximize| opt.maximize(maximize)).build()?))
    })
}

pub fn muon(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        let opt = set(Muon::builder(params), c.lr, GroupBuilder::lr);
        let opt = set(opt, c.weight_decay, |opt, decay| opt.weight_decay(decay));
        let opt = set(opt, c.momentum, |opt, momentum| opt.momentum(momentum));
        let opt = set(opt, c.nesterov, |opt, nesterov| opt.nesterov(nesterov));
        let opt = set(opt, c.ns_coefficients, |opt, (x, y, z)| opt.ns_coefficients(x, y, z));
        let opt = set(opt, c.eps.map(Eps::one), |opt, eps| opt.eps(eps));
        let opt = set(opt, c.ns_steps, |opt, steps| opt.ns_steps(steps));
        let matched = c.adjust_lr_fn.as_deref().map(|name| name == "match_rms_adamw");
        let adjust = matched.map(|matched| if matched { AdjustLr::MatchRmsAdamW } else { AdjustLr::Original });
        Ok(Box::new(set(opt, adjust, |opt, adjust| opt.adjust_lr(adjust)).build()?))
    })
}

pub fn adadelta(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        let opt = set(Adadelta::builder(params), c.lr, GroupBuilder::lr);
        let opt = set(opt, c.rho, |opt, rho| opt.rho(rho));
        let opt = set(opt, c.eps.map(Eps::one), |opt, eps| opt.eps(eps));
        let opt = set(opt, c.weight_decay, |opt, decay| opt.weight_decay(decay));
        Ok(Box::new(set(opt, c.maximize, |opt, maximize| opt.maximize(maximize)).build()?))
    })
}

pub fn adamax(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        let opt = set(Adamax::builder(params), c.lr, GroupBuilder::lr);
        let opt = set(opt, c.betas, |opt, betas| opt.betas(betas.0, betas.1));
        let opt = set(opt, c.eps.map(Eps::one), |opt, eps| opt.eps(eps));
        let opt = set(opt, c.weight_decay, |opt, decay| opt.weight_decay(decay));
        Ok(Box::new(set(opt, c.maximize, |opt, maximize| opt.maximize(maximize)).build()?))
    })
}

pub fn asgd(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        let opt = set(Asgd::builder(params), c.lr, GroupBuilder::lr);
        let opt = set(opt, c.lambd, |opt, lambd| opt.lambd(lambd));
        let opt = set(opt, c.alpha, |opt, alpha| opt.alpha(alpha));
        let opt = set(opt, c.t0, |opt, t0| opt.t0(t0));
        let opt = set(opt, c.weight_decay, |opt, decay| opt.weight_decay(decay));
        Ok(Box::new(set(opt, c.maximize, |opt, maximize| opt.maximize(maximize)).build()?))
    })
}

pub fn nadam(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        let opt = set(NAdam::builder(params), c.lr, GroupBuilder::lr);
        let opt = set(opt, c.betas, |opt, betas| opt.betas(betas.0, betas.1));
        let opt = set(opt, c.eps.map(Eps::one), |opt, eps| opt.eps(eps));
        let opt = set(opt, c.weight_decay, |opt, decay| opt.weight_decay(decay));
        let opt = set(opt, c.momentum_decay, |opt, decay| opt.momentum_decay(decay));
        let opt = set(opt, c.decoupled_weight_decay, |opt, decoupled| opt.decoupled_weight_decay(decoupled));
        Ok(Box::new(set(opt, c.maximize, |opt, maximize| opt.maximize(maximize)).build()?))
    })
}

pub fn radam(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        let opt = set(RAdam::builder(params), c.lr, GroupBuilder::lr);
        let opt = set(opt, c.betas, |opt, betas| opt.betas(betas.0, betas.1));
        let opt = set(opt, c.eps.map(Eps::one), |opt, eps| opt.eps(eps));
        let opt = set(opt, c.weight_decay, |opt, decay| opt.weight_decay(decay));
        let opt = set(opt, c.decoupled_weight_decay, |opt, decoupled| opt.decoupled_weight_decay(decoupled));
        Ok(Box::new(set(opt, c.maximize, |opt, maximize| opt.maximize(maximize)).build()?))
    })
}

pub fn rprop(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        let opt = set(Rprop::builder(params), c.lr, GroupBuilder::lr);
        let opt = set(opt, c.etas, |opt, etas| opt.etas(etas.0, etas.1));
        let opt = set(opt, c.step_sizes, |opt, sizes| opt.step_sizes(sizes.0, sizes.1));
        Ok(Box::new(set(opt, c.maximize, |opt, maximize| opt.maximize(maximize)).build()?))
    })
}

pub fn lion(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        let opt = set(Lion::builder(params), c.lr, GroupBuilder::lr);
        let opt = set(opt, c.betas, |opt, betas| opt.betas(betas.0, betas.1));
        let opt = set(opt, c.weight_decay, |opt, decay| opt.weight_decay(decay));
        Ok(Box::new(set(opt, c.maximize, |opt, maximize| opt.maximize(maximize)).build()?))
    })
}

pub fn lamb(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        let opt = set(Lamb::builder(params), c.lr, GroupBuilder::lr);
        let opt = set(opt, c.betas, |opt, betas| opt.betas(betas.0, betas.1));
        let opt = set(opt, c.eps.map(Eps::one), |opt, eps| opt.eps(eps));
        let opt = set(opt, c.weight_decay, |opt, decay| opt.weight_decay(decay));
        let opt = set(opt, c.adaptive, |opt, adaptive| opt.adaptive(adaptive));
        Ok(Box::new(set(opt, c.maximize, |opt, maximize| opt.maximize(maximize)).build()?))
    })
}

pub fn lars(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        let opt = set(Lars::builder(params), c.lr, GroupBuilder::lr);
        let opt = set(opt, c.momentum, |opt, momentum| opt.momentum(momentum));
        let opt = set(opt, c.weight_decay, |opt, decay| opt.weight_decay(decay));
        let opt = set(opt, c.trust_coefficient, |opt, trust| opt.trust_coefficient(trust));
        let opt = set(opt, c.adaptive, |opt, adaptive| opt.adaptive(adaptive));
        Ok(Box::new(set(opt, c.maximize, |opt, maximize| opt.maximize(maximize)).build()?))
    })
}

pub fn timm_lamb(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        let opt = set(Lamb::builder(params).timm(), c.lr, GroupBuilder::lr);
        let opt = set(opt, c.betas, |opt, betas| opt.betas(betas.0, betas.1));
        let opt = set(opt, c.weight_decay, |opt, decay| opt.weight_decay(decay));
        let opt = set(opt, c.always_adapt, |opt, always| opt.always_adapt(always));
        let opt = set(opt, c.trust_clip, |opt, clip| opt.trust_clip(clip));
        let opt = set(opt, c.max_grad_norm, |opt, norm| opt.max_grad_norm(Some(norm)));
        Ok(Box::new(opt.build()?))
    })
}

pub fn timm_lars(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        let opt = set(Lars::builder(params).form(LarsForm::Timm), c.lr, GroupBuilder::lr);
        let opt = set(opt, c.momentum, |opt, momentum| opt.momentum(momentum));
        let opt = set(opt, c.weight_decay, |opt, decay| opt.weight_decay(decay));
        let opt = set(opt, c.trust_clip, |opt, clip| opt.trust_clip(clip));
        Ok(Box::new(set(opt, c.nesterov, |opt, nesterov| opt.nesterov(nesterov)).build()?))
    })
}

pub fn timm_adafactor(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        let form = AdafactorForm::T5 { warmup_init: c.warmup_init.unwrap_or(false) };
        let opt = set(Adafactor::builder(params).form(form), c.decay_rate, |opt, decay| opt.beta2_decay(decay));
        Ok(Box::new(set(opt, c.weight_decay, |opt, decay| opt.weight_decay(decay)).build()?))
    })
}

/// Steps each configuration with the same gradients as Python, and records the parameters every hundred steps.
fn trajectories(given: &Given<'_>, make: impl Fn(&[Tensor], &Config, bool) -> Made) -> Result<Found> {
    let mut found = Found::default();
    let (count, complete): (usize, bool) = (given.value("parameters")?, given.value("complete")?);
    for implementation in given.value::<Vec<String>>("implementations")? {
        for dtype in ["float32", "float64"] {
            let name = format!("{implementation}.{dtype}");
            if given.tensor(&format!("{name}.start.0")).is_err() {
                // The references from the papers are only in float64.
                ensure!(dtype == "float32", "Python gave nothing in float64");
                continue;
            }
            let tensors = |what: &str| {
                (0..count).map(|index| given.tensor(&format!("{name}.{what}.{index}"))).collect::<Result<Vec<_>>>()
            };
            let (starts, targets) = (tensors("start")?, tensors("target")?);
            for (number, config) in given.value::<Vec<Config>>("configs")?.iter().enumerate() {
                let params: Vec<_> = starts.iter().map(|start| start.copy().set_requires_grad(true)).collect();
                let mut opt = make(&params, config, implementation == "fused")?;
                for step in 0..1000 {
                    let used = params.len() - usize::from(step % 3 == 2 && !complete);
                    for (param, target) in params.iter().zip(&targets).take(used) {
                        // A loss whose gradient is `grad`.
                        let grad = (param.detach() - target.get(step)).sin();
                        (param * grad).sum(param.kind()).backward();
                    }
                    opt.step()?;
                    opt.zero_grad()?;
                    if step % 100 == 99 {
                        for (index, param) in params.iter().enumerate() {
                            found.insert(format!("{name}.{number}.{step}.{index}"), param);
                        }
                    }
                }
            }
        }
    }
    Ok(found)
}

/// As `trajectories`, with sparse gradients.
pub fn sparse_adam(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for name in ["float32", "float64"] {
        let rows = given.tensor(&format!("{name}.rows"))?;
        for (number, c) in given.value::<Vec<Config>>("configs")?.iter().enumerate() {
            let start =
                |index: usize| Ok(given.tensor(&format!("{name}.start.{index}"))?.copy().set_requires_grad(true));
            let params: Vec<_> = (0..2).map(start).collect::<Result<_>>()?;
            let opt = set(SparseAdam::builder(&params), c.lr, GroupBuilder::lr);
            let opt = set(opt, c.betas, |opt, betas| opt.betas(betas.0, betas.1));
            let opt = set(opt, c.eps.map(Eps::one), |opt, eps| opt.eps(eps));
            let mut opt = set(opt, c.maximize, |opt, maximize| opt.maximize(maximize)).build()?;
            for step in 0..1000 {
                for (index, param) in params.iter().take(2 - usize::from(step % 3 == 2)).enumerate() {
                    let used = if index == 1 && step % 5 == 4 { 0 } else { 6 };
                    let used = rows.get(step).narrow(0, 0, used).remainder(param.size()[0]);
                    let taken = Tensor::embedding(param, &used, -1, false, true);
                    (&taken * (taken.detach() * 3.0 + step as f64).sin()).sum(param.kind()).backward();
                }
                opt.step()?;
                opt.zero_grad()?;
                if step % 100 == 99 {
                    for (index, param) in params.iter().enumerate() {
                        found.insert(format!("{name}.{number}.{step}.{index}"), param);
                    }
                }
            }
        }
    }
    Ok(found)
}
