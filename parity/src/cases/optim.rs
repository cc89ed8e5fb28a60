//! Gradient clipping, averaged weights (EMA and SWA), and Adafactor with NaN and infinite gradients, as in PyTorch.

use anyhow::Result;
use overdrive_core::Optimizer;
use overdrive_optim::{Adafactor, AveragedModel, Averaging, ClipGradNorm, clip_grad_value_};
use tch::{Device, Tensor, nn};

use crate::record::{Found, Given};

/// How many gradients Python gives (its `SHAPES`).
const GRADIENTS: usize = 4;

/// Zero parameters that have copies of these gradients; from a backward pass, because tch cannot set a gradient.
fn with_gradients(grads: &[Tensor]) -> Vec<Tensor> {
    let params: Vec<_> = grads.iter().map(|grad| grad.zeros_like().set_requires_grad(true)).collect();
    for (param, grad) in params.iter().zip(grads) {
        (param * grad).sum(param.kind()).backward();
    }
    params
}

fn grads(given: &Given<'_>, dtype: &str) -> Result<Vec<Tensor>> {
    (0..GRADIENTS).map(|index| given.tensor(&format!("{dtype}.{index}"))).collect()
}

pub fn clip_grad_norm(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    let orders = given.value::<Vec<serde_json::Value>>("orders")?;
    // JSON has no infinity, so Python writes it as a string.
    let orders: Vec<f64> = orders.iter().map(|order| order.as_f64().unwrap_or(f64::INFINITY)).collect();
    for dtype in ["float32", "float64"] {
        let grads = grads(given, dtype)?;
        let bounds = given.value::<Vec<f64>>("bounds")?;
        let cases = bounds.iter().flat_map(|bound| orders.iter().map(move |order| (*bound, *order)));
        for (number, (bound, order)) in cases.enumerate() {
            let params = with_gradients(&grads);
            let norm = ClipGradNorm::new(bound).norm_type(order).clip_(&params)?;
            found.insert(format!("{dtype}.{number}.norm"), &norm);
            for (index, param) in params.iter().enumerate() {
                found.insert(format!("{dtype}.{number}.{index}"), &param.grad());
            }
        }
    }
    Ok(found)
}

pub fn clip_grad_value(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for dtype in ["float32", "float64"] {
        let grads = grads(given, dtype)?;
        for (number, bound) in given.value::<Vec<f64>>("bounds")?.into_iter().enumerate() {
            let params = with_gradients(&grads);
            clip_grad_value_(&params, bound)?;
            for (index, param) in params.iter().enumerate() {
                found.insert(format!("{dtype}.{number}.{index}"), &param.grad());
            }
        }
    }
    Ok(found)
}

/// The parameters after each of a few steps, in two of which a gradient has a NaN or an infinity.
pub fn adafactor_nan(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for dtype in ["float32", "float64"] {
        let start = |index| Ok(given.tensor(&format!("{dtype}.start.{index}"))?.copy().set_requires_grad(true));
        let params: Vec<Tensor> = (0..given.value("parameters")?).map(start).collect::<Result<_>>()?;
        let mut opt = Adafactor::builder(&params).build()?;
        for step in 0..given.value("steps")? {
            for (index, param) in params.iter().enumerate() {
                let grad = given.tensor(&format!("{dtype}.{step}.{index}"))?;
                (param * grad).sum(param.kind()).backward();
            }
            opt.step()?;
            opt.zero_grad()?;
            for (index, param) in params.iter().enumerate() {
                found.insert(format!("{dtype}.{step}.{index}"), param);
            }
        }
    }
    Ok(found)
}

pub fn averaged_model(given: &Given<'_>) -> Result<Found> {
    let mut found = Found::default();
    for dtype in ["float32", "float64"] {
        let mut vs = nn::VarStore::new(Device::Cpu);
        let _model = nn::batch_norm1d(vs.root(), 7, nn::BatchNormConfig::default());
        if dtype == "float64" {
            vs.double();
        }
        let ema = Averaging::Ema { decay: 0.9 };
        let mut averages = [
            ("ema", AveragedModel::new(&vs, ema)?),
            ("swa", AveragedModel::new(&vs, Averaging::Swa)?),
            ("ema_with_buffers", AveragedModel::builder(&vs, ema).use_buffers(true).build()?),
            ("swa_with_buffers", AveragedModel::builder(&vs, Averaging::Swa).use_buffers(true).build()?),
        ];
        for step in 0..20 {
            for (key, mut variable) in vs.variables() {
                let value = given.tensor(&format!("{dtype}.{step}.{key}"))?;
                tch::no_grad(|| variable.copy_(&value));
            }
            for (_, average) in &mut averages {
                average.update()?;
            }
        }
        for (kind, average) in &averages {
            for average in average.averages()? {
                let key = average.name().unwrap_or_default();
                found.insert(format!("{dtype}.{kind}.{key}"), average.tensor());
            }
        }
    }
    Ok(found)
}
