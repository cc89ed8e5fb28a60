//! Optimizers that compute the loss more than once per step: L-BFGS, and SAM with its two backward passes.

use anyhow::{Result, ensure};
use overdrive_core::{Optimizer, Stateful};
use overdrive_optim::{Lbfgs, LineSearch, Sam, Sgd};
use serde::Deserialize;
use tch::{Kind, Tensor};

use crate::record::{Found, Given};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Config {
    lr: Option<f64>,
    max_iter: Option<i64>,
    max_eval: Option<i64>,
    tolerance_grad: Option<f64>,
    tolerance_change: Option<f64>,
    history_size: Option<i64>,
    line_search_fn: Option<String>,
}

impl Config {
    fn build(&self, params: &[Tensor]) -> Result<Lbfgs> {
        let mut opt = Lbfgs::builder(params);
        if let Some(value) = self.lr {
            opt = opt.lr(value);
        }
        if let Some(value) = self.max_iter {
            opt = opt.max_iter(value);
        }
        if let Some(value) = self.max_eval {
            opt = opt.max_eval(value);
        }
        if let Some(value) = self.tolerance_grad {
            opt = opt.tolerance_grad(value);
        }
        if let Some(value) = self.tolerance_change {
            opt = opt.tolerance_change(value);
        }
        if let Some(value) = self.history_size {
            opt = opt.history_size(value);
        }
        if let Some(name) = &self.line_search_fn {
            ensure!(name == "strong_wolfe", "line search {name}");
            opt = opt.line_search_fn(LineSearch::StrongWolfe);
        }
        Ok(opt.build()?)
    }
}

pub fn rosenbrock(given: &Given<'_>) -> Result<Found> {
    trajectories(given, 0, |params, _| {
        let x = &params[0];
        let (head, tail) = (x.slice(0, 0, -1, 1), x.slice(0, 1, None, 1));
        let (valley, bowl): (Tensor, Tensor) = (&tail - &head * &head, 1.0 - &head);
        (valley.square() * 100.0 + bowl.square()).sum(x.kind())
    })
}

pub fn network(given: &Given<'_>) -> Result<Found> {
    trajectories(given, 2, |params, data| {
        let hidden = (data[0].matmul(&params[0]) + &params[1]).tanh();
        (hidden.matmul(&params[2]) + &params[3] - &data[1]).square().mean(None::<Kind>)
    })
}

/// Runs the steps of each configuration. Halfway, a new optimizer continues from the saved state.
fn trajectories(given: &Given<'_>, data: usize, loss: impl Fn(&[Tensor], &[Tensor]) -> Tensor) -> Result<Found> {
    let mut found = Found::default();
    let (count, steps): (usize, usize) = (given.value("parameters")?, given.value("steps")?);
    for name in ["float32", "float64"] {
        let tensors = |what: &str, count: usize| {
            (0..count).map(|index| given.tensor(&format!("{name}.{what}.{index}"))).collect::<Result<Vec<_>>>()
        };
        let (starts, data) = (tensors("start", count)?, tensors("data", data)?);
        for (number, config) in given.value::<Vec<Config>>("configs")?.iter().enumerate() {
            let params: Vec<_> = starts.iter().map(|start| start.copy().set_requires_grad(true)).collect();
            let mut opt = config.build(&params)?;
            for step in 0..steps {
                if step == steps / 2 {
                    let state = opt.state_dict()?.copied()?;
                    opt = config.build(&params)?;
                    opt.load_state_dict(&state)?;
                }
                let value = opt.step_with(|| {
                    let loss = loss(&params, &data);
                    loss.f_backward()?;
                    anyhow::Ok(loss)
                })?;
                let value = Tensor::from(value).to_kind(params[0].kind());
                found.insert(format!("{name}.{number}.{step}.loss"), &value);
                for (index, param) in params.iter().enumerate() {
                    found.insert(format!("{name}.{number}.{step}.{index}"), param);
                }
            }
            let state = opt.state_dict()?;
            for count in ["func_evals", "n_iter"] {
                found
                    .insert(format!("{name}.{number}.{count}"), &Tensor::from(state.int(&format!("state.0.{count}"))?));
            }
        }
    }
    Ok(found)
}

#[derive(Deserialize)]
struct SamConfig {
    rho: f64,
    adaptive: bool,
    lr: f64,
    momentum: f64,
}

pub fn asam(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let count: usize = given.value("parameters")?;
    let tensors =
        |what: &str| (0..count).map(|index| given.tensor(&format!("{what}.{index}"))).collect::<Result<Vec<_>>>();
    let (starts, targets) = (tensors("start")?, tensors("target")?);
    for (number, config) in given.value::<Vec<SamConfig>>("configs")?.into_iter().enumerate() {
        let params: Vec<_> = starts.iter().map(|start| start.copy().set_requires_grad(true)).collect();
        let sgd = Sgd::builder(&params).lr(config.lr).momentum(config.momentum).build()?;
        let mut opt = Sam::new(sgd, config.rho)?.adaptive(config.adaptive);
        for step in 0..200 {
            let used = count - usize::from(step % 3 == 2);
            let backward = || {
                for (param, target) in params.iter().zip(&targets).take(used) {
                    // A loss whose gradient is `sin(param - target)`.
                    (-(param - target.get(step)).cos()).sum(param.kind()).backward();
                }
            };
            backward();
            opt.ascend()?;
            backward();
            opt.step()?;
            opt.zero_grad()?;
            if step % 20 == 19 {
                for (index, param) in params.iter().enumerate() {
                    found.insert(format!("{number}.{step}.{index}"), param);
                }
            }
        }
    }
    Ok(found)
}
