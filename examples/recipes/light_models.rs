//! Light models compared on one task: time, memory and accuracy of ResNet-18, MobileNetV2 and EfficientNet-B0.
//!
//! Its losses are those of `parity/recipes/light_models.py`: `cargo xtask parity recipes`.
//!
//!     cargo run -p overdrive-examples --example recipe_light_models
#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use overdrive::dataload::{Mnist, ToFloat};
use overdrive::nn::models::{Efficientnet, MobilenetV2, Resnet, ResnetBlock};
use overdrive::nn::{Forward, NnError};
use overdrive::prelude::*;
use overdrive::profile::Monitor;

// Model

/// A model of color photographs, given gray digits.
#[derive(Module)]
struct OnDigits {
    model: Box<dyn Forward>,
}

impl OnDigits {
    fn new(name: &str) -> Result<Self> {
        let model: Box<dyn Forward> = match name {
            "resnet18" => Box::new(Resnet::builder(ResnetBlock::Basic, [2, 2, 2, 2]).num_classes(10).build()?),
            "mobilenet_v2" => Box::new(MobilenetV2::builder().num_classes(10).build()?),
            "efficientnet_b0" => Box::new(Efficientnet::builder().num_classes(10).build()?),
            _ => bail!("there is no model {name}"),
        };
        Ok(Self { model })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor, NnError> {
        self.model.forward(&x.expand([-1, 3, -1, -1], false).upsample_nearest2d([56, 56], None, None))
    }
}

// Data

const MNIST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/mnist");

type Loader = DataLoader<(Tensor, Tensor)>;

fn loaders(device: Device) -> Result<(Loader, Loader)> {
    let mnist = Mnist::open(MNIST)?;
    let normalize = || ToFloat::new(&[0.1307], &[0.3081]);
    let train =
        DataLoader::builder(mnist.train.first(640)).batch_size(32).shuffle(true).generator(None).collate(normalize()?);
    let test = DataLoader::builder(mnist.test.first(200)).batch_size(100).generator(None).collate(normalize()?);
    Ok((train.to_device(device).build()?, test.to_device(device).build()?))
}

// Training

fn train(model: &OnDigits, loader: &Loader) -> Result<()> {
    let mut optimizer = AdamW::builder(model).lr(1e-3).weight_decay(0.01).build()?;
    let mut scheduler = LrScheduler::new(&mut optimizer, OneCycleLr::new(3e-3, loader.len().unwrap_or(1) as u64))?;
    model.train();
    for batch in loader {
        let (images, target) = batch?;
        let loss = model.forward(&images)?.cross_entropy_for_logits(&target);
        optimizer.zero_grad()?;
        loss.backward();
        optimizer.step()?;
        scheduler.step(&mut optimizer)?;
        println!("loss {}", loss.double_value(&[]));
    }
    Ok(())
}

fn test(model: &OnDigits, loader: &Loader) -> Result<f64> {
    model.eval();
    let _no_grad = tch::no_grad_guard();
    let mut right = Vec::new();
    for batch in loader {
        let (images, target) = batch?;
        right.push(model.forward(&images)?.argmax(1, false).eq_tensor(&target));
    }
    Ok(Tensor::cat(&right, 0).mean(Kind::Float).double_value(&[]))
}

fn main() -> Result<()> {
    let device = Device::cuda_if_available();
    let (train_loader, test_loader) = loaders(device)?;
    for name in ["resnet18", "mobilenet_v2", "efficientnet_b0"] {
        tch::manual_seed(0);
        let model = OnDigits::new(name)?;
        model.to(device)?;
        let (monitor, start) = (Monitor::builder().interval(Duration::from_millis(50)).start()?, Instant::now());
        train(&model, &train_loader)?;
        let (seconds, samples) = (start.elapsed().as_secs_f64(), monitor.samples());
        let peak = samples.iter().filter_map(|it| Some(it.process?.resident_memory_bytes >> 20)).max();
        println!(
            "{name}: {:.1} M parameters, {seconds:.1} s, {} MiB, {:.1}%",
            model.num_parameters() as f64 / 1e6,
            peak.unwrap_or_default(),
            100.0 * test(&model, &test_loader)?
        );
    }
    Ok(())
}
