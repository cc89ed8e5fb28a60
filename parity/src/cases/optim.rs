//! Fused optimizers over 1,000 steps.

use anyhow::Result;
use overdrive_core::Optimizer;
use overdrive_optim::{AdamW, Sgd, clip_grad_norm_};
use serde::Deserialize;
use tch::Tensor;

use crate::record::{Found, Given};

#[derive(Deserialize)]
#[serde(default)]
struct AdamWConfig {
    lr: f64,
    betas: (f64, f64),
    eps: f64,
    weight_decay: f64,
    amsgrad: bool,
    maximize: bool,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self { lr: 1e-3, betas: (0.9, 0.999), eps: 1e-8, weight_decay: 1e-2, amsgrad: false, maximize: false }
    }
}

#[derive(Deserialize, Default)]
#[serde(default)]
struct SgdConfig {
    lr: f64,
    momentum: f64,
    dampening: f64,
    weight_decay: f64,
    nesterov: bool,
    maximize: bool,
}

pub fn fused_adamw(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c: &AdamWConfig| {
        let opt = AdamW::builder(params).lr(c.lr).betas(c.betas.0, c.betas.1).eps(c.eps);
        Ok(Box::new(opt.weight_decay(c.weight_decay).amsgrad(c.amsgrad).maximize(c.maximize).build()?))
    })
}

pub fn fused_sgd(given: &Given<'_>) -> Result<Found> {
    trajectories(given, |params, c: &SgdConfig| {
        let opt = Sgd::builder(params).lr(c.lr).momentum(c.momentum).dampening(c.dampening);
        Ok(Box::new(opt.weight_decay(c.weight_decay).nesterov(c.nesterov).maximize(c.maximize).build()?))
    })
}

/// Steps each configuration on the same gradients as Python, and records every hundredth state.
fn trajectories<C: serde::de::DeserializeOwned>(
    given: &Given<'_>,
    make: impl Fn(Vec<Tensor>, &C) -> Result<Box<dyn Optimizer>>,
) -> Result<Found> {
    let mut found = Found::default();
    for name in ["float32", "float64"] {
        let tensors = |what: &str| {
            (0..4).map(|index| given.tensor(&format!("{name}.{what}.{index}"))).collect::<Result<Vec<_>>>()
        };
        let targets = tensors("target")?;
        for (number, config) in given.value::<Vec<C>>("configs")?.iter().enumerate() {
            let params: Vec<_> = tensors("start")?.into_iter().map(|start| start.set_requires_grad(true)).collect();
            let mut opt = make(params.iter().map(Tensor::shallow_clone).collect(), config)?;
            for step in 0..1000 {
                let used = params.len() - usize::from(step % 3 == 2);
                for (param, target) in params.iter().zip(&targets).take(used) {
                    // A loss whose gradient is the sine itself.
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
    Ok(found)
}

pub fn clip_grad_norm(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for name in ["float32", "float64"] {
        let grads = (0..4).map(|index| given.tensor(&format!("{name}.{index}"))).collect::<Result<Vec<_>>>()?;
        for (number, bound) in given.value::<Vec<f64>>("bounds")?.into_iter().enumerate() {
            let params: Vec<_> = grads.iter().map(|grad| grad.zeros_like().set_requires_grad(true)).collect();
            for (param, grad) in params.iter().zip(&grads) {
                (param * grad).sum(param.kind()).backward();
            }
            let norm = clip_grad_norm_(&params, bound)?;
            found.insert(format!("{name}.{number}.norm"), &norm);
            for (index, param) in params.iter().enumerate() {
                found.insert(format!("{name}.{number}.{index}"), &param.grad());
            }
        }
    }
    Ok(found)
}
