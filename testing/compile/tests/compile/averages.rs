//! Averages of weights that compiled steps keep.

use std::cell::Cell;

use overdrive::core::Optimizer;
use overdrive::optim::{AdamW, AveragedModel, AveragedModelBuilder, Averaging};
use overdrive_compile as compile;

use crate::beside::strict;
use crate::losses::{batch, mlp};

/// Trains two models for 20 steps, one of them compiled, with averages of these options, and compares the averages.
fn follow(averaging: Averaging, options: fn(AveragedModelBuilder) -> AveragedModelBuilder) {
    let Some(_alone) = crate::compiling() else { return };
    let (plain, compiled) = (mlp(), mlp());
    let averages = |model| options(AveragedModel::builder(model, averaging)).build().unwrap();
    let (mut plain_averages, mut found) = (averages(&plain), averages(&compiled));
    let adamw = |model| AdamW::builder(model).lr(0.01).build().unwrap();
    let (mut plain_opt, mut opt) = (adamw(&plain), adamw(&compiled));
    let calls = Cell::new(0);
    let mut step = compile::step(&compiled, |batch| {
        calls.set(calls.get() + 1);
        Ok(compiled.forward(&batch[0])?.cross_entropy_for_logits(&batch[1]))
    })
    .options(strict());
    for number in 0..20 {
        let batch = batch(number);
        tch::manual_seed(number);
        plain.forward(&batch[0]).unwrap().cross_entropy_for_logits(&batch[1]).backward();
        plain_opt.step().unwrap();
        plain_opt.zero_grad().unwrap();
        plain_averages.update().unwrap();
        tch::manual_seed(number);
        let _ = step.run_and_average(&mut opt, &mut found, &batch).unwrap();
        assert_eq!(found.n_averaged(), plain_averages.n_averaged());
        let pairs = plain_averages.averages().unwrap().into_iter().zip(found.averages().unwrap());
        for (expected, found) in pairs {
            let is_close = found.tensor().allclose(expected.tensor(), 1e-4, 1e-6, false);
            assert!(is_close, "step {number}: the average of {:?}", expected.name());
        }
    }
    // The first step copies the weights, the second runs without being recorded, and the next two are recorded.
    assert_eq!((calls.get(), step.why_eager()), (4, None));
}

#[test]
fn an_ema_whose_decay_grows_follows_a_plain_one() {
    follow(Averaging::Ema { decay: 0.9 }, |builder| builder.warm_up(true));
}

#[test]
fn a_mean_follows_a_plain_one() {
    follow(Averaging::Swa, |builder| builder);
}

/// Steps with and without averages are recorded separately. A step without them leaves the averages alone, also once
/// both are compiled.
#[test]
fn steps_with_and_without_averages_take_turns() {
    let Some(_alone) = crate::compiling() else { return };
    let model = mlp();
    let mut opt = AdamW::builder(&model).build().unwrap();
    let mut averages = AveragedModel::new(&model, Averaging::Swa).unwrap();
    let loss = |batch: &[tch::Tensor]| Ok(model.forward(&batch[0])?.cross_entropy_for_logits(&batch[1]));
    let mut step = compile::step(&model, loss).options(strict());
    for number in 0..12 {
        let before = averages.averages().unwrap()[0].tensor().copy();
        if number % 2 == 0 {
            let _ = step.run_and_average(&mut opt, &mut averages, &batch(number)).unwrap();
        } else {
            let _ = step.run(&mut opt, &batch(number)).unwrap();
        }
        let is_same = averages.averages().unwrap()[0].tensor() == &before;
        assert_eq!((averages.n_averaged(), is_same), (number / 2 + 1, number % 2 == 1), "step {number}");
    }
}
