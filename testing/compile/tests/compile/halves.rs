//! Whole steps with numbers of 16 bits, and over windows of micro-batches.

use overdrive::prelude::*;
use overdrive_compile as compile;
use overdrive_compile::LossResult;

use crate::beside::strict;
use crate::losses::{batch, mlp};

/// Trains two layers of this dtype, one compiled, whose gradients are the batch's numbers, and whose weights are set to 0
/// before each step: they are then the update.
fn adamw_rounds_once(kind: Kind) {
    let Some(_alone) = crate::compiling() else { return };
    let [plain, compiled] = [(); 2].map(|()| nn::Linear::builder(64, 64).bias(false).build().unwrap());
    for layer in [&plain, &compiled] {
        layer.to(kind).unwrap();
    }
    let loss =
        |layer: &nn::Linear, batch: &[Tensor]| -> LossResult { Ok((&*layer.weight * &batch[0]).sum(Kind::Float)) };
    let [mut plain_opt, mut opt] = [&plain, &compiled].map(|layer| AdamW::builder(layer).lr(0.0123).build().unwrap());
    let mut step = compile::step(&compiled, |batch| loss(&compiled, batch)).options(strict());
    for number in 0..8 {
        let batch = [Tensor::randn([64, 64], (Kind::Float, Device::Cpu)).to_kind(kind)];
        for layer in [&plain, &compiled] {
            tch::no_grad(|| drop(layer.weight.shallow_clone().zero_()));
        }
        loss(&plain, &batch).unwrap().backward();
        plain_opt.step().unwrap();
        plain_opt.zero_grad().unwrap();
        let _ = step.run(&mut opt, &batch).unwrap();
        let others = plain.weight.not_equal_tensor(&compiled.weight).sum(Kind::Int64).int64_value(&[]);
        // Few are so near to the middle of two numbers of 16 bits that the last bit in float32 decides.
        assert!(others <= 64 * 64 / 100, "step {number}: {others} of {} are rounded otherwise", 64 * 64);
    }
}

#[test]
fn adamw_rounds_bfloat16_once() {
    adamw_rounds_once(Kind::BFloat16);
}

#[test]
fn adamw_rounds_float16_once() {
    adamw_rounds_once(Kind::Half);
}

/// Trains two models of the same initial values, one compiled, with this loss in the step.
fn follows(loss: fn(&nn::Sequential, &[Tensor]) -> LossResult, tolerance: f64) {
    let Some(_alone) = crate::compiling() else { return };
    let (plain, compiled) = (mlp(), mlp());
    let [mut plain_opt, mut opt] = [&plain, &compiled].map(|model| AdamW::builder(model).build().unwrap());
    let mut step = compile::step(&compiled, |batch| loss(&compiled, batch)).options(strict());
    for number in 0..20 {
        let batch = batch(number);
        tch::manual_seed(number);
        let expected = loss(&plain, &batch).unwrap();
        expected.backward();
        plain_opt.step().unwrap();
        plain_opt.zero_grad().unwrap();
        tch::manual_seed(number);
        let (found, expected) = (step.run(&mut opt, &batch).unwrap().double_value(&[]), expected.double_value(&[]));
        assert!((found - expected).abs() <= tolerance * expected, "step {number}: {found}, but {expected} uncompiled");
    }
}

fn cross_entropy(model: &nn::Sequential, x: &Tensor, y: &Tensor) -> LossResult {
    Ok(model.forward(x)?.cross_entropy_for_logits(y))
}

/// Fused loops round to bfloat16 in other places, which has 3 digits.
#[test]
fn autocast_in_a_whole_step() {
    follows(
        |model, batch| {
            let _autocast = AutocastGuard::new(Device::Cpu, Kind::BFloat16)?;
            cross_entropy(model, &batch[0], &batch[1])
        },
        1e-2,
    );
}

/// One update for two micro-batches: in a whole step, the window is the closure's.
#[test]
fn accumulation_in_a_whole_step() {
    follows(
        |model, batch| {
            let half = |number: i64| {
                let [x, y] = [0, 1].map(|place| batch[place].narrow(0, 8 * number, 8));
                cross_entropy(model, &x, &y)
            };
            Ok((half(0)? + half(1)?) / 2.0)
        },
        1e-5,
    );
}
