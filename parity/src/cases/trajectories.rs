//! Optimizers over 1,000 steps, with the options that Python has chosen.

use anyhow::{Result, bail, ensure};
use overdrive_core::Optimizer;
use overdrive_optim::{
    Adadelta, Adafactor, AdafactorForm, Adagrad, Adam, AdamW, Adamax, AdjustLr, Asgd, Lamb, Lars, LarsForm, Lion, Muon,
    NAdam, RAdam, RmsProp, Rprop, Sgd, SparseAdam,
};
use serde::Deserialize;
use tch::Tensor;

use crate::record::{Found, Given};

/// Options under PyTorch's names. Options that Python leaves out keep our defaults, so that the defaults are compared
/// too.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
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

#[derive(Clone, Copy, Debug, Deserialize, PartialEq)]
#[serde(untagged)]
enum Eps {
    One(f64),
    Two(Option<f64>, f64),
}

type Made = Result<Box<dyn Optimizer>>;

/// Sets an option if the configuration has it, and removes it from the configuration.
macro_rules! set {
    ($opt:ident, $config:ident, eps) => {
        match $config.eps.take() {
            Some(Eps::One(eps) | Eps::Two(_, eps)) => $opt.eps(eps),
            None => $opt,
        }
    };
    ($opt:ident, $config:ident, two_eps) => {
        match $config.eps.take() {
            Some(Eps::One(eps2)) => $opt.eps(None, eps2),
            Some(Eps::Two(eps1, eps2)) => $opt.eps(eps1, eps2),
            None => $opt,
        }
    };
    ($opt:ident, $config:ident, ns_coefficients) => {
        match $config.ns_coefficients.take() {
            Some((a, b, c)) => $opt.ns_coefficients(a, b, c),
            None => $opt,
        }
    };
    ($opt:ident, $config:ident, adjust_lr) => {
        match $config.adjust_lr_fn.take().as_deref() {
            Some("match_rms_adamw") => $opt.adjust_lr(AdjustLr::MatchRmsAdamW),
            Some("original") => $opt.adjust_lr(AdjustLr::Original),
            Some(other) => bail!("adjust_lr_fn {other}"),
            None => $opt,
        }
    };
    ($opt:ident, $config:ident, max_grad_norm) => {
        match $config.max_grad_norm.take() {
            Some(norm) => $opt.max_grad_norm(Some(norm)),
            None => $opt,
        }
    };
    ($opt:ident, $config:ident, betas) => {
        set!($opt, $config, pair betas)
    };
    ($opt:ident, $config:ident, etas) => {
        set!($opt, $config, pair etas)
    };
    ($opt:ident, $config:ident, step_sizes) => {
        set!($opt, $config, pair step_sizes)
    };
    ($opt:ident, $config:ident, pair $option:ident) => {
        match $config.$option.take() {
            Some((first, second)) => $opt.$option(first, second),
            None => $opt,
        }
    };
    ($opt:ident, $config:ident, $option:ident) => {
        match $config.$option.take() {
            Some(value) => $opt.$option(value),
            None => $opt,
        }
    };
}

/// Makes an optimizer from a builder and the configuration's options of these names. An error if the configuration has
/// others.
macro_rules! made {
    ($builder:expr, $config:ident, $($option:ident),+) => {{
        let mut config = $config.clone();
        let opt = $builder;
        let opt = set!(opt, config, lr);
        $(let opt = set!(opt, config, $option);)+
        ensure!(config == Config::default(), "no option of this optimizer: {config:?}");
        Ok(Box::new(opt.build()?) as Box<dyn Optimizer>)
    }};
}

pub fn adam(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, fused| {
        made!(Adam::builder(params).fused(fused), c, betas, eps, weight_decay, amsgrad, maximize)
    })
}

pub fn adamw(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, fused| {
        made!(AdamW::builder(params).fused(fused), c, betas, eps, weight_decay, amsgrad, maximize)
    })
}

pub fn sgd(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, fused| {
        made!(Sgd::builder(params).fused(fused), c, momentum, dampening, weight_decay, nesterov, maximize)
    })
}

pub fn rmsprop(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        made!(RmsProp::builder(params), c, alpha, eps, weight_decay, momentum, centered, maximize)
    })
}

pub fn adagrad(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, fused| {
        let opt = Adagrad::builder(params).fused(fused);
        made!(opt, c, lr_decay, eps, weight_decay, initial_accumulator_value, maximize)
    })
}

pub fn adafactor(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        made!(Adafactor::builder(params), c, beta2_decay, two_eps, d, weight_decay, maximize)
    })
}

pub fn muon(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        let opt = Muon::builder(params);
        made!(opt, c, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr)
    })
}

pub fn adadelta(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| made!(Adadelta::builder(params), c, rho, eps, weight_decay, maximize))
}

pub fn adamax(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| made!(Adamax::builder(params), c, betas, eps, weight_decay, maximize))
}

pub fn asgd(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| made!(Asgd::builder(params), c, lambd, alpha, t0, weight_decay, maximize))
}

pub fn nadam(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        let opt = NAdam::builder(params);
        made!(opt, c, betas, eps, weight_decay, momentum_decay, decoupled_weight_decay, maximize)
    })
}

pub fn radam(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        made!(RAdam::builder(params), c, betas, eps, weight_decay, decoupled_weight_decay, maximize)
    })
}

pub fn rprop(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| made!(Rprop::builder(params), c, etas, step_sizes, maximize))
}

pub fn lion(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| made!(Lion::builder(params), c, betas, weight_decay, maximize))
}

pub fn lamb(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| made!(Lamb::builder(params), c, betas, eps, weight_decay, adaptive, maximize))
}

pub fn lars(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        made!(Lars::builder(params), c, momentum, weight_decay, trust_coefficient, adaptive, maximize)
    })
}

pub fn timm_lamb(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        made!(Lamb::builder(params).timm(), c, betas, weight_decay, always_adapt, trust_clip, max_grad_norm)
    })
}

pub fn timm_lars(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        made!(Lars::builder(params).form(LarsForm::Timm), c, momentum, weight_decay, trust_clip, nesterov)
    })
}

pub fn timm_adafactor(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c, _| {
        let mut c = c.clone();
        let form = AdafactorForm::T5 { warmup_init: c.warmup_init.take().unwrap_or(false) };
        let opt = Adafactor::builder(params).form(form);
        let decay = c.decay_rate.take();
        let opt = if let Some(decay) = decay { opt.beta2_decay(decay) } else { opt };
        made!(opt, c, weight_decay)
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
            let made: Made = made!(SparseAdam::builder(&params), c, betas, eps, maximize);
            let mut opt = made?;
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
