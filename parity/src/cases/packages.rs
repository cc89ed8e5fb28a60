//! Schedule-free optimizers and Prodigy, compared with their Python packages.

use anyhow::Result;
use overdrive_core::{Optimizer, OptimizerError, Stateful};
use overdrive_optim::{AdamWScheduleFree, GroupBuilder, Prodigy, SgdScheduleFree};
use serde::Deserialize;
use tch::Tensor;

use crate::record::{Found, Given};

/// Options under the packages' names. Options that Python leaves out keep our defaults.
#[derive(Deserialize, Default)]
#[serde(default, deny_unknown_fields)]
struct Config {
    beta3: Option<f64>,
    betas: Option<(f64, f64)>,
    d0: Option<f64>,
    d_coef: Option<f64>,
    decouple: Option<bool>,
    eps: Option<f64>,
    growth_rate: Option<f64>,
    lr: Option<f64>,
    momentum: Option<f64>,
    r: Option<f64>,
    safeguard_warmup: Option<bool>,
    slice_p: Option<i64>,
    use_bias_correction: Option<bool>,
    warmup_steps: Option<i64>,
    weight_decay: Option<f64>,
    weight_lr_power: Option<f64>,
}

/// Sets an option if there is a value.
fn set<B, T>(builder: B, value: Option<T>, set_option: impl FnOnce(B, T) -> B) -> B {
    match value {
        Some(value) => set_option(builder, value),
        None => builder,
    }
}

/// An optimizer that may have a training and an evaluation mode.
trait Switching: Optimizer + Stateful {
    fn switch(&mut self, _train: bool) -> Result<(), OptimizerError> {
        Ok(())
    }
}

macro_rules! switching {
    ($($optimizer:ty),+) => {$(
        impl Switching for $optimizer {
            fn switch(&mut self, train: bool) -> Result<(), OptimizerError> {
                if train { self.train() } else { self.eval() }
            }
        }
    )+};
}

switching!(SgdScheduleFree, AdamWScheduleFree);
impl Switching for Prodigy {}

pub fn schedule_free_sgd(given: &Given<'_>) -> Result<Found> {
    trajectories(given, switches, |params, c| {
        let opt = set(SgdScheduleFree::builder(&params[..2]), c.lr, GroupBuilder::lr);
        let opt = opt.add_param_group(SgdScheduleFree::group(&params[2..]).weight_decay(0.05));
        let opt = set(opt, c.momentum, |opt, momentum| opt.momentum(momentum));
        let opt = set(opt, c.weight_decay, |opt, decay| opt.weight_decay(decay));
        let opt = set(opt, c.warmup_steps, |opt, steps| opt.warmup_steps(steps));
        let opt = set(opt, c.r, |opt, r| opt.r(r));
        Ok(set(opt, c.weight_lr_power, |opt, power| opt.weight_lr_power(power)).build()?)
    })
}

pub fn schedule_free_adamw(given: &Given<'_>) -> Result<Found> {
    trajectories(given, switches, |params, c| {
        let opt = set(AdamWScheduleFree::builder(&params[..2]), c.lr, GroupBuilder::lr);
        let opt = opt.add_param_group(AdamWScheduleFree::group(&params[2..]).weight_decay(0.05));
        let opt = set(opt, c.betas, |opt, betas| opt.betas(betas.0, betas.1));
        let opt = set(opt, c.eps, |opt, eps| opt.eps(eps));
        let opt = set(opt, c.weight_decay, |opt, decay| opt.weight_decay(decay));
        let opt = set(opt, c.warmup_steps, |opt, steps| opt.warmup_steps(steps));
        let opt = set(opt, c.r, |opt, r| opt.r(r));
        Ok(set(opt, c.weight_lr_power, |opt, power| opt.weight_lr_power(power)).build()?)
    })
}

pub fn prodigy(given: &Given<'_>) -> Result<Found> {
    let measures = |opt: &mut Prodigy, step: usize, record: &mut Record<'_>| {
        record.number(&format!("{step}.d"), opt.d());
        if step % 25 == 24 {
            record.params(&step.to_string());
            lower_rates(opt)?;
        }
        Ok(())
    };
    trajectories(given, measures, |params, c| {
        let opt = set(Prodigy::builder(&params[..2]), c.lr, GroupBuilder::lr);
        let opt = opt.add_param_group(Prodigy::group(&params[2..]).weight_decay(0.05));
        let opt = set(opt, c.betas, |opt, betas| opt.betas(betas.0, betas.1));
        let opt = set(opt, c.beta3, |opt, beta3| opt.beta3(beta3));
        let opt = set(opt, c.eps, |opt, eps| opt.eps(eps));
        let opt = set(opt, c.weight_decay, |opt, decay| opt.weight_decay(decay));
        let opt = set(opt, c.decouple, |opt, decouple| opt.decouple(decouple));
        let opt = set(opt, c.use_bias_correction, |opt, correct| opt.use_bias_correction(correct));
        let opt = set(opt, c.safeguard_warmup, |opt, safeguard| opt.safeguard_warmup(safeguard));
        let opt = set(opt, c.d0, |opt, d0| opt.d0(d0));
        let opt = set(opt, c.d_coef, |opt, coefficient| opt.d_coef(coefficient));
        let opt = set(opt, c.growth_rate, |opt, rate| opt.growth_rate(rate));
        Ok(set(opt, c.slice_p, |opt, slice| opt.slice_p(slice)).build()?)
    })
}

/// Learning rates that change, and evaluations between steps.
fn switches<O: Switching>(opt: &mut O, step: usize, record: &mut Record<'_>) -> Result<()> {
    if step % 25 == 24 {
        record.params(&format!("{step}.train"));
        opt.switch(false)?;
        record.params(&format!("{step}.eval"));
        opt.switch(true)?;
        lower_rates(opt)?;
    }
    Ok(())
}

fn lower_rates(opt: &mut impl Optimizer) -> Result<()> {
    for group in 0..opt.num_groups() {
        let lr = opt.lr(group).unwrap_or(f64::NAN);
        opt.set_lr(group, lr * 0.9)?;
    }
    Ok(())
}

struct Record<'a> {
    found: &'a mut Found,
    name: String,
    params: &'a [Tensor],
}

impl Record<'_> {
    fn number(&mut self, label: &str, value: f64) {
        self.found.insert(format!("{}.{label}", self.name), &Tensor::from(value));
    }

    fn params(&mut self, label: &str) {
        for (index, param) in self.params.iter().enumerate() {
            self.found.insert(format!("{}.{label}.{index}", self.name), param);
        }
    }
}

/// Steps each configuration with the same gradients as Python. At one step, a new optimizer continues from the saved
/// state.
fn trajectories<O: Switching>(
    given: &Given<'_>,
    each_step: impl Fn(&mut O, usize, &mut Record<'_>) -> Result<()>,
    make: impl Fn(&[Tensor], &Config) -> Result<O>,
) -> Result<Found> {
    let mut found = Found::default();
    let (count, steps): (usize, usize) = (given.value("parameters")?, given.value("steps")?);
    for name in ["float32", "float64"] {
        let tensors = |what: &str| {
            (0..count).map(|index| given.tensor(&format!("{name}.{what}.{index}"))).collect::<Result<Vec<_>>>()
        };
        let (starts, targets) = (tensors("start")?, tensors("target")?);
        for (number, config) in given.value::<Vec<Config>>("configs")?.iter().enumerate() {
            let params: Vec<_> = starts.iter().map(|start| start.copy().set_requires_grad(true)).collect();
            let mut opt = make(&params, config)?;
            let mut record = Record { found: &mut found, name: format!("{name}.{number}"), params: &params };
            for step in 0..steps {
                if step == 40 {
                    let state = opt.state_dict()?.copied()?;
                    opt = make(&params, config)?;
                    opt.load_state_dict(&state)?;
                }
                for (param, target) in params.iter().zip(&targets).take(count - usize::from(step % 3 == 0)) {
                    // A loss whose gradient is `grad`.
                    let grad = (param.detach() - target.get(step as i64)).sin();
                    (param * grad).sum(param.kind()).backward();
                }
                opt.step()?;
                opt.zero_grad()?;
                each_step(&mut opt, step, &mut record)?;
            }
        }
    }
    Ok(found)
}
