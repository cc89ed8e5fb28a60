//! PyTorch's `examples/mnist`: a convolutional network, Adadelta and StepLR.
//!
//! Its losses are those of `parity/recipes/mnist.py`, to the bit: `cargo xtask parity recipes`.
//!
//!     cargo run -p overdrive-examples --example recipe_mnist
#![forbid(unsafe_code)]

use anyhow::Result;
use clap::Parser;
use overdrive::dataload::{Mnist, ToFloat};
use overdrive::optim::Adadelta;
use overdrive::prelude::*;
use tch::Reduction;

// Model

#[derive(Module)]
struct Net {
    conv1: nn::Conv2d,
    conv2: nn::Conv2d,
    dropout1: nn::Dropout,
    dropout2: nn::Dropout,
    fc1: nn::Linear,
    fc2: nn::Linear,
}

impl Net {
    fn new() -> Result<Self> {
        Ok(Self {
            conv1: nn::Conv2d::new(1, 32, 3)?,
            conv2: nn::Conv2d::new(32, 64, 3)?,
            dropout1: nn::Dropout::new(0.25)?,
            dropout2: nn::Dropout::new(0.5)?,
            fc1: nn::Linear::new(9216, 128)?,
            fc2: nn::Linear::new(128, 10)?,
        })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let x = self.conv1.forward(x)?.relu();
        let x = self.conv2.forward(&x)?.relu();
        let x = x.max_pool2d_default(2);
        let x = self.dropout1.forward(&x)?.flatten(1, -1);
        let x = self.fc1.forward(&x)?.relu();
        let x = self.dropout2.forward(&x)?;
        Ok(self.fc2.forward(&x)?.log_softmax(1, Kind::Float))
    }
}

// Data

const MNIST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/mnist");

type Loader = DataLoader<(Tensor, Tensor)>;

fn loaders(args: &Args, device: Device) -> Result<(Loader, Loader)> {
    let mnist = Mnist::open(MNIST)?;
    let (train, test) = (mnist.train.first(args.train_samples), mnist.test.first(args.test_samples));
    let normalize = || ToFloat::new(&[0.1307], &[0.3081]);
    let train =
        DataLoader::builder(train).batch_size(args.batch_size).shuffle(true).generator(None).collate(normalize()?);
    let test = DataLoader::builder(test).batch_size(args.test_batch_size).generator(None).collate(normalize()?);
    Ok((train.to_device(device).build()?, test.to_device(device).build()?))
}

// Training

/// PyTorch's MNIST example
#[derive(Parser)]
struct Args {
    #[arg(long, default_value_t = 64)]
    batch_size: usize,
    #[arg(long, default_value_t = 1000)]
    test_batch_size: usize,
    #[arg(long, default_value_t = 2)]
    epochs: usize,
    #[arg(long, default_value_t = 1.0)]
    lr: f64,
    #[arg(long, default_value_t = 0.7)]
    gamma: f64,
    #[arg(long, default_value_t = 1)]
    seed: i64,
    #[arg(long, default_value_t = 1)]
    log_interval: usize,
    #[arg(long, default_value_t = 1600)]
    train_samples: usize,
    #[arg(long, default_value_t = 1000)]
    test_samples: usize,
}

fn train(args: &Args, model: &Net, train_loader: &Loader, optimizer: &mut Adadelta, epoch: usize) -> Result<()> {
    model.train();
    for (batch_idx, batch) in train_loader.iter().enumerate() {
        let (data, target) = batch?;
        optimizer.zero_grad()?;
        let output = model.forward(&data)?;
        let loss = output.nll_loss(&target);
        loss.backward();
        optimizer.step()?;
        if batch_idx % args.log_interval == 0 {
            let done = 100 * batch_idx / train_loader.len().unwrap_or(1);
            println!("Train Epoch: {epoch} [{done}%]\tloss {}", loss.double_value(&[]));
        }
    }
    Ok(())
}

fn test(model: &Net, test_loader: &Loader) -> Result<()> {
    model.eval();
    let _no_grad = tch::no_grad_guard();
    let (mut test_loss, mut correct, mut count) = (0.0, 0, 0);
    for batch in test_loader {
        let (data, target) = batch?;
        let output = model.forward(&data)?;
        test_loss += output.g_nll_loss(&target, None::<&Tensor>, Reduction::Sum, -100).double_value(&[]);
        correct += output.argmax(1, false).eq_tensor(&target).sum(Kind::Int64).int64_value(&[]);
        count += target.size()[0];
    }
    let (test_loss, accuracy) = (test_loss / count as f64, 100.0 * correct as f64 / count as f64);
    println!("Test set: average loss {test_loss}, accuracy {accuracy:.1}%");
    Ok(())
}

fn main() -> Result<()> {
    let args = Args::parse();
    tch::manual_seed(args.seed);
    let device = Device::cuda_if_available();
    let (train_loader, test_loader) = loaders(&args, device)?;

    let model = Net::new()?;
    model.to(device)?;
    let mut optimizer = Adadelta::builder(&model).lr(args.lr).build()?;
    let mut scheduler = LrScheduler::new(&mut optimizer, StepLr::new(1).gamma(args.gamma))?;
    for epoch in 1..=args.epochs {
        train(&args, &model, &train_loader, &mut optimizer, epoch)?;
        test(&model, &test_loader)?;
        scheduler.step(&mut optimizer)?;
    }
    Ok(())
}
