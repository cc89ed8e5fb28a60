//! Gradient accumulation that equals the large batch, compared with the usual recipe that divides by a fixed count.
//!
//! The large batch is split three ways: evenly, unevenly, and by tokens of which some are masked. The gradients of each
//! split are compared with those of the large batch, for an `Accumulator` and for `loss / k`.
//!
//! Expect: the accumulator within float32's rounding of the large batch every time; the fixed recipe only when all
//! micro-batches have the same count. Then an epoch of 7 batches in windows of 3: three steps, the last one on a single
//! batch.
//!
//!     cargo run -p overdrive-examples --example 02_accumulation
#![forbid(unsafe_code)]

use anyhow::{Result, ensure};
use overdrive::prelude::*;
use tch::Reduction;

const CPU: Device = Device::Cpu;
const CLASSES: i64 = 5;
/// The target of a token that does not count, as in PyTorch.
const MASKED: i64 = -100;

/// The mean loss over the rows whose target is not masked; NaN if all are masked.
fn loss(model: &nn::Sequential, (inputs, targets): (&Tensor, &Tensor)) -> Result<Tensor> {
    Ok(model.forward(inputs)?.cross_entropy_loss::<Tensor>(targets, None, Reduction::Mean, MASKED, 0.0))
}

/// Returns all gradients as one vector, and zeroes them.
fn take_grads(opt: &mut Sgd) -> Result<Tensor> {
    let grads: Vec<_> = opt.params().iter().map(|param| param.grad().flatten(0, -1)).collect();
    let row = Tensor::cat(&grads, 0);
    opt.zero_grad()?;
    Ok(row)
}

fn main() -> Result<()> {
    tch::manual_seed(3);
    let model = sequential![nn::Linear::new(16, 32)?, nn::Tanh, nn::Linear::new(32, CLASSES)?];
    let inputs = Tensor::randn([64, 16], (Kind::Float, CPU));
    let targets = Tensor::randint(CLASSES, [64], (Kind::Int64, CPU));
    // Two thirds of the last 24 rows do not count.
    let masked = targets.copy();
    for row in (40..64).filter(|row| row % 3 != 0) {
        let _ = masked.get(row).fill_(MASKED);
    }

    println!("relative difference from the large batch's gradient:\n");
    println!("{:<34}{:>14}{:>14}", "micro-batches", "accumulator", "loss / k");
    let splits: [(&str, &Tensor, &[i64], bool); 3] = [
        ("16, 16, 16, 16", &targets, &[16, 16, 16, 16], true),
        ("30, 30, 4", &targets, &[30, 30, 4], false),
        ("20, 20, 24, tokens partly masked", &masked, &[20, 20, 24], false),
    ];
    for (name, targets, sizes, even) in splits {
        let (exact, fixed) = compare(&model, &inputs, targets, sizes)?;
        println!("{name:<34}{exact:>14.1e}{fixed:>14.1e}");
        ensure!(exact < 1e-5, "the accumulator's gradient is not the large batch's");
        ensure!(even == (fixed < 1e-5), "the fixed recipe is right for even micro-batches, and only for them");
    }
    println!();
    an_epoch(&model, &inputs, &targets)
}

/// The relative differences of the accumulator and of the fixed recipe from the large batch.
fn compare(model: &nn::Sequential, inputs: &Tensor, targets: &Tensor, sizes: &[i64]) -> Result<(f64, f64)> {
    let mut opt = Sgd::builder(model).build()?;
    loss(model, (inputs, targets))?.backward();
    let large = take_grads(&mut opt)?;
    let difference = |grads: &Tensor| (grads - &large).norm().double_value(&[]) / large.norm().double_value(&[]);

    let parts = inputs.split_with_sizes(sizes, 0).into_iter().zip(targets.split_with_sizes(sizes, 0));
    let parts: Vec<_> = parts.collect();
    let mut accum = Accumulator::new(sizes.len())?;
    for micro in accum.windows(&parts) {
        let (inputs, targets) = micro.batch;
        // The number of rows that the mean is over: those not masked.
        let count = targets.ne(MASKED).sum(Kind::Int64).int64_value(&[]);
        accum.backward(&opt, &loss(model, (inputs, targets))?, Tokens(count), micro.closes)?;
    }
    let exact = difference(&take_grads(&mut opt)?);

    for (inputs, targets) in &parts {
        (loss(model, (inputs, targets))? / sizes.len() as f64).backward();
    }
    Ok((exact, difference(&take_grads(&mut opt)?)))
}

/// Steps at the end of every window, including the last, partial one.
fn an_epoch(model: &nn::Sequential, inputs: &Tensor, targets: &Tensor) -> Result<()> {
    let mut opt = Sgd::builder(model).lr(0.5).build()?;
    let mut accum = Accumulator::new(3)?;
    let before = loss(model, (inputs, targets))?.double_value(&[]);
    let (mut micros, mut windows) = (0, Vec::new());
    for micro in accum.windows(inputs.split(10, 0).iter().zip(&targets.split(10, 0))) {
        let (inputs, _) = micro.batch;
        accum.backward(&opt, &loss(model, micro.batch)?, Samples(inputs.size()[0]), micro.closes)?;
        micros += 1;
        if micro.closes {
            opt.step()?;
            opt.zero_grad()?;
            windows.push(std::mem::take(&mut micros));
        }
    }
    let after = loss(model, (inputs, targets))?.double_value(&[]);
    println!(
        "64 samples in batches of 10, windows of 3: steps after {windows:?} batches, loss {before:.4} -> {after:.4}"
    );
    ensure!(windows == [3, 3, 1] && after < before);
    Ok(())
}
