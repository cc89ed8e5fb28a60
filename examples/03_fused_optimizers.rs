//! Fused AdamW: parameter groups, a changing learning rate, and a comparison with tch's AdamW.
//!
//! Trains the same model twice from the same weights on the same batches, with `overdrive`'s AdamW and with tch's, and
//! compares the weights; then trains with weight decay on the matrices only, a warm-up and a cosine.
//!
//! The model is of tch's own modules, in a `VarStore`, because tch's optimizer needs one: wherever the other examples
//! give an optimizer, a checkpoint or a `DistributedDataParallel` a module, a `VarStore` will do. In the same way,
//! tch's optimizer works wherever one of these crates does, in a `TchOptimizer`.
//!
//! Expect: weights that differ only by rounding; the time of a step with each optimizer (one thread; only printed,
//! because the dev profile is not for measuring); a falling loss; biases that weight decay has not changed.
//!
//!     cargo run -p overdrive-examples --example 03_fused_optimizers
#![forbid(unsafe_code)]

use std::f64::consts::PI;
use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use overdrive::prelude::*;
use tch::nn::{self, Module, OptimizerConfig};

const CPU: Device = Device::Cpu;
const STEPS: i32 = 100;
const WEIGHT_DECAY: f64 = 0.05;

fn main() -> Result<()> {
    // The tensors here are too small for threads to help either optimizer.
    tch::set_num_threads(1);
    the_same_as_tch()?;
    groups_and_a_schedule()?;
    decay_leaves_biases_alone()
}

/// A perceptron of twelve small layers: fused steps gain most with many small parameters.
fn model() -> (nn::VarStore, nn::Sequential) {
    tch::manual_seed(11);
    let vs = nn::VarStore::new(CPU);
    let mut model = nn::seq();
    for layer in 0..12 {
        model = model.add(nn::linear(vs.root() / layer, 32, 32, Default::default())).add_fn(Tensor::tanh);
    }
    (vs, model)
}

/// The loss on a batch that depends only on the step.
fn loss(model: &nn::Sequential, step: i32) -> Tensor {
    tch::manual_seed(i64::from(step));
    let x = Tensor::randn([64, 32], (Kind::Float, CPU));
    (model.forward(&x) - x.roll(1, 1).tanh()).square().mean(Kind::Float)
}

/// Trains and returns the weights, and the total time of the optimizer's steps.
fn train<O: Optimizer>(vs: &nn::VarStore, model: &nn::Sequential, mut opt: O) -> Result<(Vec<Tensor>, Duration)> {
    let mut stepping = Duration::ZERO;
    for step in 0..STEPS {
        loss(model, step).backward();
        let started = Instant::now();
        opt.step()?;
        stepping += started.elapsed();
        opt.zero_grad()?;
    }
    Ok((vs.trainable_variables(), stepping))
}

fn the_same_as_tch() -> Result<()> {
    let (vs, net) = model();
    let opt = AdamW::builder(&vs).lr(1e-3).weight_decay(WEIGHT_DECAY).build()?;
    let (ours, our_time) = train(&vs, &net, opt)?;

    let (vs, net) = model();
    let opt = TchOptimizer::new(nn::AdamW { wd: WEIGHT_DECAY, ..Default::default() }.build(&vs, 1e-3)?);
    let (theirs, their_time) = train(&vs, &net, opt)?;

    let difference = |(ours, theirs): (&Tensor, &Tensor)| (ours - theirs).abs().max().double_value(&[]);
    let difference = ours.iter().zip(&theirs).map(difference).fold(0.0, f64::max);
    let micros = |time: Duration| time.as_secs_f64() * 1e6 / f64::from(STEPS);
    println!("after {STEPS} steps over {} parameters the weights differ by at most {difference:.1e}", ours.len());
    println!("a step took {:.0} us fused and {:.0} us in tch", micros(our_time), micros(their_time));
    ensure!(difference < 1e-4, "not the same optimizer");
    Ok(())
}

/// A warm-up over the first tenth, then a cosine to zero.
fn learning_rate(step: i32) -> f64 {
    let (step, warm_up, steps) = (f64::from(step), f64::from(STEPS / 10), f64::from(STEPS));
    let peak = 3e-3;
    if step < warm_up {
        peak * (step + 1.0) / warm_up
    } else {
        peak * 0.5 * (1.0 + (PI * (step - warm_up) / (steps - warm_up)).cos())
    }
}

fn groups_and_a_schedule() -> Result<()> {
    let (vs, net) = model();
    // Two groups: `.add_param_group(AdamW::group(biases).weight_decay(0.0))` would make the second by hand.
    let mut opt = AdamW::builder(&vs).betas(0.9, 0.99).weight_decay(WEIGHT_DECAY).decay_groups().build()?;
    println!("{} groups: matrices decay by {WEIGHT_DECAY}, biases do not", opt.num_groups());

    let mut losses = Vec::new();
    for step in 0..STEPS {
        for group in 0..opt.num_groups() {
            opt.set_lr(group, learning_rate(step))?;
        }
        let loss = loss(&net, step);
        loss.backward();
        opt.step()?;
        opt.zero_grad()?;
        losses.push(loss.double_value(&[]));
        if step % 25 == 0 || step == STEPS - 1 {
            println!("step {step:>3}: lr {:.5}, loss {:.4}", opt.lr(0).unwrap_or_default(), losses[step as usize]);
        }
    }
    ensure!(losses[STEPS as usize - 1] < 0.95 * losses[0], "the loss did not fall");
    Ok(())
}

/// With zero gradients, only weight decay changes a parameter, and the biases' group has none.
fn decay_leaves_biases_alone() -> Result<()> {
    let (vs, net) = model();
    let (matrices, biases): (Vec<_>, Vec<_>) = vs.trainable_variables().into_iter().partition(|p| p.dim() > 1);
    let (matrix, bias) = (matrices[0].shallow_clone(), biases[0].shallow_clone());
    let (matrix_before, bias_before) = (matrix.copy(), bias.copy());
    let biases = AdamW::group(biases).weight_decay(0.0);
    let mut opt = AdamW::builder(matrices).add_param_group(biases).lr(0.1).weight_decay(0.5).build()?;
    (loss(&net, 0) * 0.0).backward();
    opt.step()?;
    let kept = matrix.norm().double_value(&[]) / matrix_before.norm().double_value(&[]);
    println!("a step on zero gradients keeps {kept:.3} of a matrix with decay, and all of a bias without");
    ensure!((kept - 0.95).abs() < 1e-6 && bias.equal(&bias_before));
    Ok(())
}
