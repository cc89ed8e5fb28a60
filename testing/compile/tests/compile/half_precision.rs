//! Compiled training steps in half precision and under autocast, and with gradient accumulation.

use overdrive::prelude::*;
use overdrive_compile as compile;
use overdrive_compile::LossResult;

use crate::beside::strict;
use crate::losses::{batch, mlp};

/// Compares compiled AdamW with eager AdamW on weights of this dtype: both compute the update in float32, and round it
/// to the dtype once. The loss makes the batch the gradient. The weights are set to 0 before each step, so that they
/// are the update after it.
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
        let different = plain.weight.not_equal_tensor(&compiled.weight).sum(Kind::Int64).int64_value(&[]);
        // The updates in float32 may differ in the last bit. That changes the rounded ones only where they are close to
        // the midpoint of two 16-bit numbers.
        assert!(different <= 64 * 64 / 100, "step {number}: {different} of {} weights differ", 64 * 64);
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

/// Trains two models with the same initial values, one of them compiled, and compares their losses at each step.
fn compare_losses(loss: fn(&nn::Sequential, &[Tensor]) -> LossResult, tolerance: f64) {
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

/// Fused loops round to bfloat16 at other points than eager operators, and bfloat16 has only 3 decimal digits: hence
/// the tolerance.
#[test]
fn autocast_in_a_whole_step() {
    compare_losses(
        |model, batch| {
            let _autocast = AutocastGuard::new(Device::Cpu, Kind::BFloat16)?;
            cross_entropy(model, &batch[0], &batch[1])
        },
        1e-2,
    );
}

/// One update for two micro-batches. In a compiled step, the closure runs both and returns their mean loss.
#[test]
fn accumulation_in_a_whole_step() {
    compare_losses(
        |model, batch| {
            let micro_batch = |number: i64| {
                let [x, y] = [0, 1].map(|index| batch[index].narrow(0, 8 * number, 8));
                cross_entropy(model, &x, &y)
            };
            Ok((micro_batch(0)? + micro_batch(1)?) / 2.0)
        },
        1e-5,
    );
}
