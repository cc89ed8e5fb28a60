use std::cell::Cell;

use overdrive::dataload::TensorDataset;
use overdrive::nn::{self as nn, sequential};
use overdrive::prelude::*;
use overdrive_compile as compile;
use overdrive_compile::{LossResult, Options};

use crate::beside::strict;

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

pub fn mlp() -> nn::Sequential {
    tch::manual_seed(1);
    sequential![
        nn::Linear::new(20, 32).unwrap(),
        nn::Relu,
        nn::Dropout::new(0.1).unwrap(),
        nn::Linear::new(32, 5).unwrap()
    ]
}

pub fn batch(step: i64) -> [Tensor; 2] {
    tch::manual_seed(100 + step);
    [Tensor::randn([16, 20], (Kind::Float, Device::Cpu)), Tensor::randint(5, [16], (Kind::Int64, Device::Cpu))]
}

/// Trains two models with the same initial values, one with a compiled loss, over windows of micro-batches, with
/// clipping and an average of the weights.
fn follows(kind: Option<Kind>, micro_batches: usize, tolerance: f64) {
    let Some(_alone) = crate::compiling() else { return };
    let (plain, compiled) = (mlp(), mlp());
    let loss = |model: &nn::Sequential, batch: &[Tensor]| {
        let _autocast = kind.map(|kind| AutocastGuard::new(Device::Cpu, kind)).transpose()?;
        Ok(model.forward(&batch[0])?.cross_entropy_for_logits(&batch[1]))
    };
    let mut loss_of = compile::loss(&compiled, |batch| loss(&compiled, batch))
        .options(Options { strict: true, ..Options::default() });
    let train = |model: &nn::Sequential, loss_of: &mut dyn FnMut(&[Tensor]) -> Tensor| {
        let mut opt = AdamW::builder(model).build().unwrap();
        let mut accum = Accumulator::new(micro_batches).unwrap();
        let mut averages = AveragedModel::new(model, Averaging::Ema { decay: 0.9 }).unwrap();
        let mut losses = Vec::new();
        for step in 0..20 {
            let batch = batch(step);
            tch::manual_seed(step);
            let loss = loss_of(&batch);
            let closes = (step as usize + 1).is_multiple_of(micro_batches);
            accum.backward(&opt, &loss, Samples(16), closes).unwrap();
            losses.push(loss.double_value(&[]));
            if closes {
                clip_grad_norm_(model, 0.5).unwrap();
                opt.step().unwrap();
                opt.zero_grad().unwrap();
                averages.update().unwrap();
            }
        }
        losses
    };
    let expected = train(&plain, &mut |batch| loss(&plain, batch).unwrap());
    let found = train(&compiled, &mut |batch| loss_of.run(batch).unwrap());
    for (step, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert!((found - expected).abs() <= tolerance * expected, "step {step}: {found}, but {expected} uncompiled");
    }
    for ((name, one), (_, other)) in plain.named_buffers().iter().zip(compiled.named_buffers()) {
        assert!(one.allclose(&other, 1e-4, 1e-5, false), "the buffer {name}");
    }
}

/// Compares gradients in float16 with uncompiled ones, if those are not 0, for a loss that is multiplied by these
/// scales.
fn follows_in_float16(scale: fn(i64) -> f64) {
    let Some(_alone) = crate::compiling() else { return };
    let [plain, compiled] = [1; 2].map(|seed| {
        tch::manual_seed(seed);
        nn::Linear::new(20, 5).unwrap()
    });
    let loss = |model: &nn::Linear, batch: &[Tensor]| -> compile::LossResult {
        let _autocast = AutocastGuard::new(Device::Cpu, Kind::Half)?;
        Ok(model.forward(&batch[0])?.to_kind(Kind::Float).square().mean(Kind::Float) * 1e-7)
    };
    let mut loss_of = compile::loss(&compiled, |batch| loss(&compiled, batch))
        .options(Options { strict: true, ..Options::default() });
    let grad = |model: &nn::Linear, loss: Tensor, scale: f64| {
        (loss * scale).backward();
        let grad = model.weight.grad().copy();
        model.weight.shallow_clone().zero_grad();
        grad
    };
    for number in 0..9 {
        let batch = batch(number);
        let expected = grad(&plain, loss(&plain, &batch).unwrap(), scale(number));
        let found = grad(&compiled, loss_of.run(&batch).unwrap(), scale(number));
        let largest = expected.abs().max().double_value(&[]);
        assert_eq!(largest > 0.0, scale(number) > 1.0);
        // The first one was computed before a scale was known.
        if number > 0 && largest > 0.0 {
            let error = (found - expected).abs().max().double_value(&[]);
            assert!(error <= 1e-2 * largest, "step {number}: off by {error} of {largest}");
        }
    }
}

/// The gradient of so small a loss is 0 in float16, unless the scale is part of it from the first operator on.
#[test]
fn gradients_in_float16_have_the_scale_of_the_last_backward_pass() {
    follows_in_float16(|number| if number < 6 { 65536.0 } else { 32768.0 });
}

/// As with a loss that has a tiny weight in every second step.
#[test]
fn a_tiny_scale_does_not_take_the_next_gradients_in_float16_away() {
    follows_in_float16(|number| if number % 2 == 0 { 65536.0 } else { 65536e-6 });
}

#[test]
fn losses_follow_plain_ones_over_windows_of_micro_batches() {
    follows(None, 2, 1e-5);
}

/// Fused loops round to bfloat16 at other points than eager operators, and bfloat16 has only 3 decimal digits.
#[test]
fn losses_in_bfloat16_follow_plain_ones() {
    follows(Some(Kind::BFloat16), 1, 1e-2);
}

/// Takes batches from two epochs of one loader in turns.
#[test]
fn two_epochs_of_one_loader_feed_one_step() {
    let Some(_alone) = crate::compiling() else { return };
    let train = |model: &nn::Sequential, step: &mut dyn FnMut(&mut AdamW, &[Tensor]) -> Tensor| {
        tch::manual_seed(9);
        let samples =
            (Tensor::randn([64, 20], (Kind::Float, Device::Cpu)), Tensor::arange(64, (Kind::Int64, Device::Cpu)));
        let loader = TensorDataset::new(samples).unwrap().loader().batch_size(16).shuffle(true).seed(3).num_workers(2);
        let loader = loader.build().unwrap();
        let mut opt = AdamW::builder(model).build().unwrap();
        let (mut losses, mut seen) = (Vec::new(), Vec::new());
        for _ in 0..2 {
            let (one, two) = (loader.iter(), loader.iter());
            for batch in one.zip(two).flat_map(|(one, two)| [one, two]) {
                let (x, labels) = batch.unwrap();
                seen.extend(Vec::<i64>::try_from(&labels).unwrap());
                tch::manual_seed(losses.len() as i64);
                losses.push(step(&mut opt, &[x, labels.remainder(5)]).double_value(&[]));
            }
        }
        (losses, seen)
    };
    let (plain, compiled) = (mlp(), mlp());
    let loss = |model: &nn::Sequential, batch: &[Tensor]| -> compile::LossResult {
        Ok(model.forward(&batch[0])?.cross_entropy_for_logits(&batch[1]))
    };
    let (expected, order) = train(&plain, &mut |opt, batch| {
        let loss = loss(&plain, batch).unwrap();
        loss.backward();
        opt.step().unwrap();
        opt.zero_grad().unwrap();
        loss
    });
    let calls = Cell::new(0);
    let mut step = compile::step(&compiled, |batch| {
        calls.set(calls.get() + 1);
        loss(&compiled, batch)
    })
    .options(Options { strict: true, ..Options::default() });
    let (found, same) = train(&compiled, &mut |opt, batch| step.run(opt, batch).unwrap());
    // The first step, and two that are recorded.
    assert_eq!((order.len(), calls.get()), (4 * 64, 3));
    assert!(order == same && order[..16] != order[16..32], "two epochs, each in its own order");
    for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert!((found - expected).abs() <= 1e-5 * expected, "step {number}: {found}, but {expected} uncompiled");
    }
}

/// Inductor's own way to draw a mask let the kernel read the mask here before it was drawn.
#[test]
fn a_loss_with_batch_normalization_and_dropout() {
    let Some(_alone) = crate::compiling() else { return };
    let make = || {
        tch::manual_seed(1);
        sequential![
            // Without a bias: normalization cancels it, so that its gradient is rounding error, which AdamW would
            // enlarge.
            nn::Linear::builder(6, 32).bias(false).build().unwrap(),
            nn::BatchNorm1d::new(32).unwrap(),
            nn::Relu,
            nn::Dropout::new(0.1).unwrap(),
            nn::Linear::new(32, 3).unwrap(),
        ]
    };
    let (plain, compiled) = (make(), make());
    let of = |model: &nn::Sequential, batch: &[Tensor]| -> LossResult {
        Ok((model.forward(&batch[0])? - &batch[1]).square().mean(Kind::Float))
    };
    let mut loss_of = compile::loss(&compiled, |batch| of(&compiled, batch)).options(strict());
    let (mut plain_opt, mut opt) =
        (AdamW::builder(&plain).build().unwrap(), AdamW::builder(&compiled).build().unwrap());
    for step in 0..20 {
        tch::manual_seed(step);
        let batch = [Tensor::randn([8, 6], FLOAT), Tensor::randn([8, 3], FLOAT)];
        tch::manual_seed(step);
        let expected = of(&plain, &batch).unwrap();
        expected.backward();
        tch::manual_seed(step);
        let found = loss_of.run(&batch).unwrap();
        found.backward();
        let (found, expected) = (found.double_value(&[]), expected.double_value(&[]));
        assert!((found - expected).abs() <= 1e-5 * expected, "step {step}: {found}, but {expected} uncompiled");
        for opt in [&mut plain_opt, &mut opt] {
            opt.step().unwrap();
            opt.zero_grad().unwrap();
        }
    }
    for ((name, one), (_, other)) in plain.named_buffers().iter().zip(compiled.named_buffers()) {
        assert!(one.allclose(&other, 1e-4, 1e-5, false), "{name}: {other} instead of {one}");
    }
}
