//! Mixed precision: autocast, and a `GradScaler` where it is needed.
//!
//! Shows which dtype autocast picks for which operator, why float16 needs a `GradScaler`, the same training run in
//! bfloat16 and in float32, and what the scaler does when a step overflows.
//!
//! Expect: products in BFloat16 and losses in Float; a float16 gradient that is zero without the scaler and right with
//! it; two final losses close to each other; one skipped step, after which the scale is halved.
//!
//!     cargo run -p overdrive-examples --example 01_amp
#![forbid(unsafe_code)]

use anyhow::{Result, ensure};
use overdrive::prelude::*;

const CPU: Device = Device::Cpu;
const FLOAT: (Kind, Device) = (Kind::Float, CPU);

fn main() -> Result<()> {
    // The tensors here are too small for threads to help.
    tch::set_num_threads(1);
    autocast_picks_a_dtype_for_each_operator()?;
    float16_gradients_vanish_without_a_scaler()?;
    bfloat16_trains_like_float32()?;
    an_overflow_skips_the_step()
}

fn autocast_picks_a_dtype_for_each_operator() -> Result<()> {
    let (x, weight) = (Tensor::randn([64, 32], FLOAT), Tensor::randn([32, 10], FLOAT));
    let targets = Tensor::zeros([64], (Kind::Int64, CPU));
    let (logits, loss) = autocast(CPU, Kind::BFloat16, || {
        let logits = x.matmul(&weight);
        let loss = logits.cross_entropy_for_logits(&targets);
        (logits, loss)
    })?;
    println!("in a region: a matrix product is {:?}, a cross-entropy {:?}", logits.kind(), loss.kind());
    ensure!(logits.kind() == Kind::BFloat16 && loss.kind() == Kind::Float);

    // A guard instead of a closure; code that needs float32 switches autocast off locally.
    let _region = AutocastGuard::new(CPU, Kind::BFloat16)?;
    let exact = Autocast::new(CPU).enabled(false).run(|| x.matmul(&weight))?;
    println!("in a disabled region within it: {:?}", exact.kind());
    ensure!(exact.kind() == Kind::Float && x.matmul(&weight).kind() == Kind::BFloat16);
    Ok(())
}

/// The largest gradient of a weight whose true gradient is 4e-9 everywhere, below float16's smallest number, 6e-8.
fn tiny_gradient(scaler: &mut GradScaler) -> Result<f64> {
    let weight = Tensor::ones([8, 1], FLOAT).set_requires_grad(true);
    let x = Tensor::ones([4, 8], FLOAT);
    let output = autocast(CPU, Kind::Half, || x.matmul(&weight))?;
    let loss = output.to_kind(Kind::Float).mean(Kind::Float) * 4e-9;
    scaler.scale(&loss)?.backward();
    let mut opt = Sgd::builder(vec![weight.shallow_clone()]).build()?;
    scaler.unscale_(&mut opt)?;
    Ok(weight.grad().max().double_value(&[]))
}

fn float16_gradients_vanish_without_a_scaler() -> Result<()> {
    let without = tiny_gradient(&mut GradScaler::builder(CPU).enabled(false).build()?)?;
    let with = tiny_gradient(&mut GradScaler::new(CPU))?;
    println!("a gradient of 4e-9 through float16: {without:.1e} without a scaler, {with:.1e} with one");
    ensure!(without == 0.0 && (with / 4e-9 - 1.0).abs() < 1e-3);
    Ok(())
}

/// Learns to tell whether a point lies inside a ring; returns the mean loss of the last 20 steps.
fn train(kind: Option<Kind>) -> Result<f64> {
    tch::manual_seed(7);
    let model = sequential![nn::Linear::new(2, 64)?, nn::Tanh, nn::Linear::new(64, 2)?];
    let mut opt = Adam::builder(&model).lr(1e-2).build()?;
    // bfloat16 has float32's range and needs no scaler: a disabled one keeps the loop the same.
    let mut scaler = GradScaler::builder(CPU).enabled(kind == Some(Kind::Half)).build()?;
    let mut losses = Vec::new();
    for _ in 0..200 {
        let points = Tensor::rand([256, 2], FLOAT) * 2.0 - 1.0;
        let inside = points.square().sum_dim_intlist(1, false, Kind::Float).lt(0.6).to_kind(Kind::Int64);
        let loss = {
            // Backward runs outside of the region, as in PyTorch.
            let _region = kind.map(|kind| AutocastGuard::new(CPU, kind)).transpose()?;
            model.forward(&points)?.cross_entropy_for_logits(&inside)
        };
        scaler.scale(&loss)?.backward();
        scaler.step(&mut opt)?;
        scaler.update()?;
        opt.zero_grad()?;
        losses.push(loss.double_value(&[]));
    }
    Ok(losses[180..].iter().sum::<f64>() / 20.0)
}

fn bfloat16_trains_like_float32() -> Result<()> {
    let (float32, bfloat16) = (train(None)?, train(Some(Kind::BFloat16))?);
    println!("loss after 200 steps: {float32:.4} in float32, {bfloat16:.4} with autocast to bfloat16");
    ensure!(float32 < 0.25, "float32 did not learn");
    ensure!((float32 - bfloat16).abs() < 0.03, "bfloat16 reached another loss");
    Ok(())
}

fn an_overflow_skips_the_step() -> Result<()> {
    let model = nn::Linear::new(4, 1)?;
    let mut opt = Sgd::builder(&model).lr(0.1).build()?;
    let mut scaler = GradScaler::new(CPU);
    for (name, factor) in [("an ordinary step", 1.0), ("a step with an infinity", f64::INFINITY)] {
        let before = model.weight.copy();
        let loss = model.forward(&Tensor::ones([8, 4], FLOAT))?.mean(Kind::Float) * factor;
        scaler.scale(&loss)?.backward();
        let skipped = scaler.step(&mut opt)?.skipped()?;
        let scale = scaler.scale_value()?;
        scaler.update()?;
        opt.zero_grad()?;
        println!("{name}: skipped {skipped}, scale {scale} -> {}", scaler.scale_value()?);
        ensure!(skipped == factor.is_infinite() && skipped == model.weight.equal(&before));
        ensure!(scaler.scale_value()? == if skipped { scale / 2.0 } else { scale });
    }
    Ok(())
}
