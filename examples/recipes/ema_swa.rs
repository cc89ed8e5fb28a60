//! Averages of weights: an exponential moving average, and stochastic weight averaging with its batch norm update.
//!
//! Its losses are those of `parity/recipes/ema_swa.py`, to the bit: `cargo xtask parity recipes`.
//!
//!     cargo run -p overdrive-examples --example recipe_ema_swa
#![forbid(unsafe_code)]

use anyhow::Result;
use overdrive::dataload::{Mnist, ToFloat};
use overdrive::nn::update_bn;
use overdrive::prelude::*;
use overdrive::sched::SwaLr;

// Model

fn make_model() -> Result<nn::Sequential> {
    Ok(sequential![
        nn::Conv2d::builder(1, 16, 3).padding(1).build()?,
        nn::BatchNorm2d::new(16)?,
        nn::Relu,
        nn::MaxPool2d::new(2),
        nn::Conv2d::builder(16, 32, 3).padding(1).build()?,
        nn::BatchNorm2d::new(32)?,
        nn::Relu,
        nn::MaxPool2d::new(2),
        nn::Flatten::new(),
        nn::Dropout::new(0.2)?,
        nn::Linear::new(1568, 10)?,
    ])
}

// Data

const MNIST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/mnist");

type Loader = DataLoader<(Tensor, Tensor)>;

fn loaders() -> Result<(Loader, Loader)> {
    let mnist = Mnist::open(MNIST)?;
    let normalize = || ToFloat::new(&[0.1307], &[0.3081]);
    let train =
        DataLoader::builder(mnist.train.first(1024)).batch_size(64).shuffle(true).generator(None).collate(normalize()?);
    let test = DataLoader::builder(mnist.test.first(500)).batch_size(250).generator(None).collate(normalize()?);
    Ok((train.build()?, test.build()?))
}

// Training

const EPOCHS: u64 = 4;
const SWA_START: u64 = 2;

fn test(name: &str, model: &nn::Sequential, loader: &Loader) -> Result<()> {
    model.eval();
    let _no_grad = tch::no_grad_guard();
    let (mut loss, mut correct) = (0.0, 0);
    for batch in loader {
        let (x, y) = batch?;
        let output = model.forward(&x)?;
        loss += output.cross_entropy_for_logits(&y).double_value(&[]);
        correct += output.argmax(1, false).eq_tensor(&y).sum(Kind::Int64).int64_value(&[]);
    }
    println!("{name}: test loss {}, {correct} of 500 right", loss / loader.len().unwrap_or(1) as f64);
    Ok(())
}

fn main() -> Result<()> {
    tch::manual_seed(0);
    let (train_loader, test_loader) = loaders()?;
    let model = make_model()?;
    let mut ema_model = AveragedModel::new(&model, Averaging::Ema { decay: 0.99 })?;
    let mut swa_model = AveragedModel::new(&model, Averaging::Swa)?;
    let mut optimizer = Sgd::builder(&model).lr(0.05).momentum(0.9).weight_decay(1e-4).build()?;
    let mut scheduler = LrScheduler::new(&mut optimizer, CosineAnnealingLr::new(EPOCHS))?;
    for epoch in 0..EPOCHS {
        model.train();
        for batch in &train_loader {
            let (input, target) = batch?;
            optimizer.zero_grad()?;
            let loss = model.forward(&input)?.cross_entropy_for_logits(&target);
            loss.backward();
            optimizer.step()?;
            ema_model.update()?;
            println!("epoch {epoch}: loss {}", loss.double_value(&[]));
        }
        if epoch == SWA_START {
            drop(scheduler);
            scheduler = LrScheduler::new(&mut optimizer, SwaLr::new(0.02).anneal_epochs(2))?;
        }
        if epoch >= SWA_START {
            swa_model.update()?;
        }
        scheduler.step(&mut optimizer)?;
    }

    let update = || update_bn(&train_loader, &model, |model, batch| -> Result<_> { Ok(model.forward(&batch?.0)?) });
    swa_model.apply(update)??;
    ema_model.apply(update)??;
    test("model", &model, &test_loader)?;
    ema_model.apply(|| test("EMA", &model, &test_loader))??;
    swa_model.apply(|| test("SWA", &model, &test_loader))?
}
