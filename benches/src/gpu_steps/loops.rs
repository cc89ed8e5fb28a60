//! Steps of optimizers that need a loop of their own: those that evaluate the loss several times, and those that step
//! in the backward pass.

use std::cell::Cell;
use std::rc::Rc;

use anyhow::{Context, Result};
use overdrive::nn::Forward;
use overdrive::optim::{Lbfgs, Sam};
use overdrive::prelude::*;
use tch::Reduction;

use super::ours::{Fault, Step, distance};
use super::{Recipe, models};

/// Iterations of L-BFGS in a step, and how many the history holds: it is full after the first step.
const ITERATIONS: i64 = 4;

/// Whether this optimizer needs one.
pub fn are_for(optimizer: &str) -> bool {
    ["LBFGS", "SAM", "InBackward"].contains(&optimizer)
}

/// Makes such a step, of the model in float32 and nothing else.
pub fn step(recipe: &Recipe, device: Device, model: impl Forward + 'static) -> Result<Step> {
    let (inputs, targets) = models::batch(recipe);
    let (inputs, targets) = (inputs.to_device(device), targets.to_device(device));
    model.to(device)?;
    let params: Vec<Tensor> = model.named_parameters().iter().map(|it| it.tensor().shallow_clone()).collect();
    let distance = distance(&params);
    let backward = move || -> Result<Tensor> {
        let outputs = model.forward(&inputs)?;
        let loss = outputs.cross_entropy_loss(&targets, None::<&Tensor>, Reduction::Mean, -100, 0.0);
        loss.backward();
        Ok(loss.detach())
    };
    let train: Box<dyn FnMut() -> Result<Tensor>> = match recipe.optimizer {
        "LBFGS" => {
            let mut opt = Lbfgs::builder(params).lr(0.1).max_iter(ITERATIONS).history_size(ITERATIONS).build()?;
            Box::new(move || {
                let mut first = None;
                opt.step_with(|| -> Result<Tensor> {
                    let loss = backward()?;
                    first.get_or_insert_with(|| loss.shallow_clone());
                    Ok(loss)
                })?;
                first.context("a step without a loss")
            })
        }
        "SAM" => {
            let mut opt = Sam::new(AdamW::builder(params).build()?, 0.05)?;
            Box::new(move || {
                let loss = backward()?;
                opt.ascend()?;
                drop(backward()?);
                opt.step()?;
                opt.zero_grad()?;
                Ok(loss)
            })
        }
        _ => {
            let mut opt = Sgd::builder(params).lr(0.01).momentum(0.9).build_in_backward()?;
            Box::new(move || {
                let loss = backward()?;
                opt.step()?;
                Ok(loss)
            })
        }
    };
    Ok(Step {
        train,
        scale: Box::new(|| Ok(1.0)),
        distance,
        kept: Box::new(|| Ok([0.0; 3])),
        fault: Rc::new(Cell::new(Fault::None)),
    })
}
