//! What changes between steps, and is noticed.

use overdrive::amp::autocast;
use overdrive::core::{Module, Optimizer};
use overdrive::nn;
use overdrive::optim::{AdamW, Sgd};
use overdrive_compile as compile;
use overdrive_compile::Options;
use tch::{Device, Kind, Tensor};

use crate::losses::{batch, mlp};

fn strict() -> Options {
    Options { strict: true, ..Options::default() }
}

/// Trains a compiled model beside a plain one, over changes that `change` makes to each before a step.
fn follows<O: Optimizer>(
    steps: i64,
    optimizer: impl Fn(&nn::Sequential) -> O,
    change: impl Fn(&nn::Sequential, &mut O, i64),
) {
    let Some(_alone) = crate::compiling() else { return };
    let (plain, compiled) = (mlp(), mlp());
    let (mut plain_opt, mut opt) = (optimizer(&plain), optimizer(&compiled));
    let loss = |model: &nn::Sequential, batch: &[Tensor]| -> compile::LossResult {
        Ok(model.forward(&batch[0])?.cross_entropy_for_logits(&batch[1]))
    };
    let mut step = compile::step(&compiled, |batch| loss(&compiled, batch)).options(strict());
    for number in 0..steps {
        change(&plain, &mut plain_opt, number);
        change(&compiled, &mut opt, number);
        let batch = batch(number);
        tch::manual_seed(number);
        let expected = loss(&plain, &batch).unwrap();
        expected.backward();
        plain_opt.step().unwrap();
        plain_opt.zero_grad().unwrap();
        let expected = expected.double_value(&[]);
        tch::manual_seed(number);
        let found = step.run(&mut opt, &batch).unwrap().double_value(&[]);
        assert!((found - expected).abs() <= 1e-5 * expected, "step {number}: {found}, but {expected} uncompiled");
    }
}

#[test]
fn counts_of_steps_of_a_layer_that_was_frozen() {
    let optimizer = |model: &nn::Sequential| AdamW::builder(model).lr(0.03).build().unwrap();
    follows(14, optimizer, |model, _, number| {
        let trained = !(4..9).contains(&number);
        for parameter in model.named_parameters().into_iter().take(2) {
            let _ = parameter.tensor().set_requires_grad(trained);
        }
    });
}

#[test]
fn a_momentum_that_becomes_0() {
    let optimizer = |model: &nn::Sequential| Sgd::builder(model).lr(0.1).momentum(0.9).fused(true).build().unwrap();
    follows(10, optimizer, |_, opt, number| {
        if number == 5 {
            opt.set_momentum(0, 0.0).unwrap();
        }
    });
}

#[test]
fn the_momentum_of_batch_normalization() {
    let Some(_alone) = crate::compiling() else { return };
    let (plain, norm) = (nn::BatchNorm1d::new(20).unwrap(), nn::BatchNorm1d::new(20).unwrap());
    let loss = |norm: &nn::BatchNorm1d, batch: &[Tensor]| -> compile::LossResult {
        Ok(norm.forward(&batch[0])?.square().mean(Kind::Float))
    };
    let mut loss_of = compile::loss(&norm, |batch| loss(&norm, batch)).options(strict());
    for number in 0..8 {
        for norm in [&plain, &norm] {
            norm.momentum.set(Some(if number < 4 { 0.1 } else { 0.5 }));
        }
        let _ = (loss(&plain, &batch(number)).unwrap(), loss_of.run(&batch(number)).unwrap());
        for ((name, one), (_, other)) in plain.named_buffers().iter().zip(norm.named_buffers()) {
            assert!(one.allclose(&other, 1e-5, 1e-6, false), "step {number}: the buffer {name}");
        }
    }
}

#[test]
fn autocast_around_a_step() {
    let Some(_alone) = crate::compiling() else { return };
    let model = nn::Linear::new(20, 4).unwrap();
    model.eval();
    let mut forward = compile::forward(&model, |inputs| Ok(vec![model.forward(&inputs[0])?])).options(strict());
    let [x, _] = batch(0);
    let mut kind = |cast: bool| {
        let mut run = || forward.run(&[x.shallow_clone()]).unwrap()[0].kind();
        if cast { autocast(Device::Cpu, Kind::BFloat16, run).unwrap() } else { run() }
    };
    for (cast, expected) in [(false, Kind::Float), (true, Kind::BFloat16), (false, Kind::Float)] {
        assert_eq!([kind(cast), kind(cast), kind(cast)], [expected; 3]);
    }
}
