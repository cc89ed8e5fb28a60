//! Every technique in one training loop: loader, autocast, scaler, accumulation, clipping, fused AdamW.
//!
//! Trains a small convolutional network on 3,000 of the shipped MNIST images, on the GPU if there is one, and tests it
//! on 1,000. On CUDA it casts to float16 and scales the loss; on a CPU it casts to bfloat16, which needs no scaler.
//!
//! Expect: an accuracy above 85% after two epochs, in well under a minute on a CPU.
//!
//!     cargo run -p overdrive-examples --example 05_everything
#![forbid(unsafe_code)]

use std::time::Instant;

use anyhow::{Result, ensure};
use overdrive::dataload::{Mnist, MnistSplit, ToFloat};
use overdrive::prelude::*;

const MNIST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/mnist");
const EPOCHS: usize = 2;
const BATCH: usize = 32;
/// Micro-batches per step: together a large batch of 64.
const WINDOW: usize = 2;
const MAX_NORM: f64 = 1.0;

fn main() -> Result<()> {
    tch::manual_seed(0);
    let device = Device::cuda_if_available();
    let kind = if device.is_cuda() { Kind::Half } else { Kind::BFloat16 };
    let mnist = Mnist::open(MNIST)?;
    let (train, test) = (loader(mnist.train.first(3_000), true)?, loader(mnist.test.first(1_000), false)?);

    let model = cnn()?;
    model.to(device)?;
    let mut opt = AdamW::builder(&model).lr(2e-3).weight_decay(0.01).build()?;
    let mut scaler = GradScaler::builder(device).enabled(kind == Kind::Half).build()?;
    let mut accum = Accumulator::new(WINDOW)?;

    println!(
        "{device:?}, autocast to {kind:?}, {} batches of {BATCH}, a step every {WINDOW}",
        train.len().unwrap_or(0)
    );
    for epoch in 1..=EPOCHS {
        model.train();
        let started = Instant::now();
        let (mut steps, mut losses) = (0, Vec::new());
        for micro in accum.windows(&train) {
            let (inputs, targets) = micro.batch?;
            let (inputs, targets) = (inputs.to_device(device), targets.to_device(device));
            let loss = {
                let _autocast = AutocastGuard::new(device, kind)?;
                model.forward(&inputs)?.cross_entropy_for_logits(&targets)
            };
            accum.backward(&opt, &scaler.scale(&loss)?, Samples(inputs.size()[0]), micro.closes)?;
            if micro.closes {
                scaler.unscale_(&mut opt)?; // clipping needs unscaled gradients
                clip_grad_norm_(opt.params(), MAX_NORM)?;
                scaler.step(&mut opt)?; // skipped when a gradient is infinite or NaN
                scaler.update()?;
                opt.zero_grad()?;
                steps += 1;
            }
            losses.push(loss.detach());
        }
        let mean_loss = Tensor::stack(&losses, 0).mean(Kind::Float).double_value(&[]);
        let seconds = started.elapsed().as_secs_f64();
        println!("epoch {epoch}: {steps} steps, mean loss {mean_loss:.4}, {seconds:.1} s");
    }
    let stats = train.stats();
    println!("waited {:.0} ms for {} batches of data", stats.wait_seconds * 1e3, stats.batches);

    let accuracy = accuracy(&model, &test, device, kind)?;
    println!("accuracy on {} test images: {:.1}%", test.dataset_len().unwrap_or(0), accuracy * 100.0);
    ensure!(accuracy > 0.85, "it should recognise more than 85%");
    Ok(())
}

type Digits = DataLoader<(Tensor, Tensor)>;

/// MNIST's images are already decoded and in memory; a folder of files would need `Cached`.
fn loader(images: MnistSplit, shuffle: bool) -> Result<Digits> {
    let collate = ToFloat::new(&[0.1307], &[0.3081])?;
    Ok(DataLoader::builder(images).batch_size(BATCH).shuffle(shuffle).num_workers(1).collate(collate).build()?)
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
        nn::Linear::new(32 * 5 * 5, 10)?,
    ])
}

fn accuracy(model: &nn::Sequential, test: &Digits, device: Device, kind: Kind) -> Result<f64> {
    model.eval();
    let _no_grad = tch::no_grad_guard();
    let (mut correct, mut seen) = (Tensor::zeros([], (Kind::Int64, device)), 0);
    for batch in test {
        let (images, labels) = batch?;
        seen += labels.size()[0];
        let logits = autocast(device, kind, || model.forward(&images.to_device(device)))??;
        correct += logits.argmax(-1, false).eq_tensor(&labels.to_device(device)).sum(Kind::Int64);
    }
    Ok(correct.int64_value(&[]) as f64 / seen as f64)
}
