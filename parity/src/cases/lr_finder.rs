//! A sweep over learning rates, and training after it, compared with Python's.

use anyhow::{Context, Result};
use overdrive_core::{Module, Optimizer, Visitor};
use overdrive_optim::{AdamW, Sgd};
use overdrive_sched::{LrFinder, Sweep};
use serde::Deserialize;
use tch::{Kind, Tensor};

use crate::record::{Found, Given};

#[derive(Deserialize)]
struct Config {
    name: String,
    mode: String,
    min_lr: f64,
    max_lr: f64,
    steps: u32,
    threshold: Option<f64>,
}

pub struct Net(pub Vec<Tensor>);

impl Module for Net {
    fn visit<'a>(&'a self, visitor: &mut dyn Visitor<'a>) {
        self.0.iter().enumerate().for_each(|(index, weight)| visitor.parameter(&index.to_string(), weight));
    }
}

pub fn lr_finder(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let (x, y) = (given.tensor("x")?, given.tensor("y")?);
    for (number, config) in given.value::<Vec<Config>>("configs")?.iter().enumerate() {
        let weights = (0..2).map(|index| Ok(given.tensor(&format!("{number}.{index}"))?.set_requires_grad(true)));
        let net = Net(weights.collect::<Result<_>>()?);
        let mut opt: Box<dyn Optimizer> = match config.name.as_str() {
            "sgd" => Box::new(Sgd::builder(&net.0).lr(0.05).momentum(0.9).build()?),
            _ => Box::new(AdamW::builder(&net.0).lr(0.01).build()?),
        };
        let step = |opt: &mut Box<dyn Optimizer>| -> Result<Tensor> {
            let loss = (x.matmul(&net.0[0]).tanh().matmul(&net.0[1]) - &y).square().mean(Kind::Float);
            loss.f_backward()?;
            opt.step()?;
            opt.zero_grad()?;
            Ok(loss)
        };
        let train =
            |opt: &mut Box<dyn Optimizer>| (0..3).map(|_| Ok(step(opt)?.double_value(&[]))).collect::<Result<Vec<_>>>();
        let mut training = train(&mut opt)?;
        let sweep = if config.mode == "linear" { Sweep::Linear } else { Sweep::Exponential };
        let finder =
            LrFinder::new().min_lr(config.min_lr).max_lr(config.max_lr).num_training(config.steps).sweep(sweep);
        let swept = finder.early_stop_threshold(config.threshold).run(&net, &mut opt, step)?;
        training.extend(train(&mut opt)?);
        let best = swept.suggestion().context("no suggestion")?;
        found.insert(format!("{number}.diverged"), &Tensor::from(swept.diverged()));
        for (name, values) in
            [("lrs", swept.lrs()), ("losses", swept.losses()), ("training", &training), ("best", &[best])]
        {
            found.insert(format!("{number}.{name}"), &Tensor::from_slice(values));
        }
    }
    Ok(found)
}
