//! Training steps, compiled and not; the same as in `peers/compile.py`.

use anyhow::{Result, bail};
use overdrive::compile;
use overdrive::nn::Forward;
use overdrive::nn::models::resnet18;
use overdrive::prelude::*;

use crate::gpt::{Gpt, VOCABULARY};

pub type Step = Box<dyn FnMut() -> Result<()>>;

/// How a step runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Uncompiled,
    Compiled,
    /// The faster one of both, by a trial.
    Auto,
}

/// Steps before the way of a step is settled.
pub const SETTLED: u32 = 24;

/// A step of the model with this name.
pub fn step(model: &str, way: Way, device: Device) -> Result<Step> {
    manual_seed(1);
    let tokens = |size: &[i64]| whole(VOCABULARY, size);
    match model {
        "mlp" => train(mlp()?, [normal(&[16, 784]), whole(10, &[16])], way, device),
        "cnn" => train(cnn()?, [normal(&[128, 1, 28, 28]), whole(10, &[128])], way, device),
        "gpt" => train(Gpt::sized(4, 128, 64)?, [tokens(&[8, 64]), tokens(&[512])], way, device),
        "resnet18" => train(resnet18()?, [normal(&[16, 3, 64, 64]), whole(1000, &[16])], way, device),
        other => bail!("there is no model {other}"),
    }
}

fn mlp() -> Result<nn::Sequential> {
    let linear = nn::Linear::new;
    Ok(sequential![linear(784, 128)?, nn::Relu, linear(128, 128)?, nn::Relu, linear(128, 10)?])
}

fn cnn() -> Result<nn::Sequential> {
    Ok(sequential![
        nn::Conv2d::new(1, 16, 3)?,
        nn::Relu,
        nn::MaxPool2d::new(2),
        nn::Conv2d::new(16, 32, 3)?,
        nn::Relu,
        nn::MaxPool2d::new(2),
        nn::Flatten::new(),
        nn::Dropout::new(0.1)?,
        nn::Linear::new(800, 10)?
    ])
}

fn train(model: impl Forward + 'static, batch: [Tensor; 2], way: Way, device: Device) -> Result<Step> {
    model.to(device)?;
    // For the rest of the process, which measures nothing else.
    let model: &'static _ = Box::leak(Box::new(model));
    let mut opt = AdamW::builder(model).lr(1e-3).build()?;
    let batch = batch.map(|it| it.to_device(device));
    let loss = |batch: &[Tensor]| Ok(model.forward(&batch[0])?.cross_entropy_for_logits(&batch[1]));
    if way == Way::Uncompiled {
        return Ok(Box::new(move || {
            let loss = model.forward(&batch[0])?.cross_entropy_for_logits(&batch[1]);
            loss.backward();
            opt.step()?;
            Ok(opt.zero_grad()?)
        }));
    }
    let options = compile::Options { strict: true, auto: way == Way::Auto, ..Default::default() };
    let mut step = compile::step(model, loss).options(options);
    Ok(Box::new(move || Ok(step.run(&mut opt, &batch).map(drop)?)))
}

fn normal(size: &[i64]) -> Tensor {
    Tensor::randn(size, (Kind::Float, Device::Cpu))
}

fn whole(below: i64, size: &[i64]) -> Tensor {
    Tensor::randint(below, size, (Kind::Int64, Device::Cpu))
}
