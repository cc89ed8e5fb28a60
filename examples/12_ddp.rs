//! Two ranks train one model on MNIST, each on its half of every batch.
//!
//! The program starts itself twice (`spawn`); the ranks meet over Gloo, get their parts of the data from a distributed
//! sampler, and hold the same model after every step. It also runs under `overdrive-run` or torchrun, with their number
//! of ranks.
//!
//! Expect: each rank's loss per epoch, and an accuracy above 85% on all test images, in well under a minute on a CPU.
//!
//!     cargo run -p overdrive-examples --example 12_ddp
#![forbid(unsafe_code)]

use anyhow::{Context, Result, ensure};
use overdrive::dataload::{DistributedSampler, Mnist, MnistSplit, SequentialSampler, ToFloat};
use overdrive::ddp::{Backend, DistributedDataParallel, InitMethod, ProcessGroup, ReduceOp, init_process_group, spawn};
use overdrive::prelude::*;

const MNIST: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../data/mnist");
const EPOCHS: usize = 2;
/// The batch size of all ranks together.
const BATCH: usize = 64;

fn main() -> Result<()> {
    Ok(spawn(2, train)?)
}

fn train() -> Result<()> {
    let group = init_process_group(Backend::Gloo, InitMethod::Auto)?;
    let mnist = Mnist::open(MNIST)?;
    let train = loader(mnist.train.first(4_000), &group, true)?;
    let test = loader(mnist.test.first(1_000), &group, false)?;

    // Any seed: rank 0's weights are sent to the others.
    tch::manual_seed(group.rank() as i64);
    let model = cnn()?;
    let ddp = DistributedDataParallel::new(&model, &group)?;
    let mut opt = AdamW::builder(&model).lr(2e-3).build()?;

    for epoch in 1..=EPOCHS {
        let mut losses = Vec::new();
        for batch in &train {
            let (images, labels) = batch?;
            let loss = ddp.forward(|| model.forward(&images))??.cross_entropy_for_logits(&labels);
            ddp.backward(&loss)?; // averages the gradients over ranks
            clip_grad_norm_(opt.params(), 1.0)?;
            opt.step()?;
            opt.zero_grad()?;
            losses.push(loss.detach());
        }
        let mean = Tensor::stack(&losses, 0).mean(Kind::Float).double_value(&[]);
        println!("epoch {epoch}: mean loss of this rank {mean:.4}");
    }

    let accuracy = accuracy(&model, &test, &group)?;
    if group.rank() == 0 {
        println!("accuracy on all ranks' test images: {:.1}%", accuracy * 100.0);
    }
    ensure!(accuracy > 0.85, "it should recognise more than 85%");
    Ok(())
}

type Digits = DataLoader<(Tensor, Tensor)>;

/// This rank's part of the images, and of the batch.
fn loader(images: MnistSplit, group: &ProcessGroup, shuffle: bool) -> Result<Digits> {
    let (len, ranks) = (Dataset::len(&images), group.size());
    ensure!(BATCH.is_multiple_of(ranks), "{BATCH} images cannot be divided evenly among {ranks} ranks");
    let loader = DataLoader::builder(images).batch_size(BATCH / ranks).collate(ToFloat::new(&[0.1307], &[0.3081])?);
    let loader = match shuffle {
        true => loader.sampler(DistributedSampler::shuffled(len, ranks, group.rank(), 7)?),
        false => loader.sampler(DistributedSampler::new(SequentialSampler::new(len), ranks, group.rank())?),
    };
    Ok(loader.build()?)
}

fn cnn() -> Result<nn::Sequential> {
    Ok(sequential![
        nn::Conv2d::new(1, 8, 3)?,
        nn::Relu,
        nn::MaxPool2d::new(2),
        nn::Conv2d::new(8, 16, 3)?,
        nn::Relu,
        nn::MaxPool2d::new(2),
        nn::Flatten::new(),
        nn::Linear::new(16 * 5 * 5, 10)?,
    ])
}

/// The accuracy over the images of all ranks.
fn accuracy(model: &nn::Sequential, test: &Digits, group: &ProcessGroup) -> Result<f64> {
    let _no_grad = tch::no_grad_guard();
    let (mut correct, mut seen) = (0, 0);
    for batch in test {
        let (images, labels) = batch?;
        let found = model.forward(&images)?.argmax(-1, false);
        correct += found.eq_tensor(&labels).sum(Kind::Int64).int64_value(&[]);
        seen += labels.size()[0];
    }
    let mut totals = Tensor::from_slice(&[correct, seen]);
    group.all_reduce(&mut totals, ReduceOp::Sum)?;
    let [correct, seen] = <[i64; 2]>::try_from(Vec::<i64>::try_from(&totals)?).ok().context("two numbers")?;
    Ok(correct as f64 / seen as f64)
}
