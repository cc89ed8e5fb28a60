//! Settings that change between steps: a compiled step follows them.

use overdrive::amp::autocast;
use overdrive::core::{Module, Optimizer};
use overdrive::nn;
use overdrive::optim::{AdamW, Sgd};
use overdrive_compile as compile;
use overdrive_compile::{LossResult, Options};
use tch::{Device, Kind, Tensor};

use crate::beside::{follows, follows_changes, strict};
use crate::losses::{batch, mlp};

fn adamw(model: &nn::Sequential) -> AdamW {
    AdamW::builder(model).build().unwrap()
}

#[test]
fn learning_rate_and_momentum_of_a_schedule() {
    let Some(_alone) = crate::compiling() else { return };
    let change = |_: &nn::Sequential, opt: &mut AdamW, step: usize| {
        opt.set_lr(0, 1e-3 / (1.0 + step as f64)).unwrap();
        opt.set_momentum(0, 0.9 - 0.01 * step as f64).unwrap();
    };
    let followed = follows_changes(mlp, adamw, change, |step| batch(step as i64), 30, strict());
    assert_eq!(followed.why_eager, None);
}

#[test]
fn counts_of_steps_of_a_layer_that_was_frozen() {
    let Some(_alone) = crate::compiling() else { return };
    let freeze = |model: &nn::Sequential, _: &mut AdamW, step: usize| {
        for parameter in model.named_parameters().into_iter().take(2) {
            let _ = parameter.tensor().set_requires_grad(!(4..9).contains(&step));
        }
    };
    let fast = |model: &nn::Sequential| AdamW::builder(model).lr(0.03).build().unwrap();
    follows_changes(mlp, fast, freeze, |step| batch(step as i64), 14, strict());
}

#[test]
fn a_momentum_that_becomes_0_and_leaves_it() {
    let Some(_alone) = crate::compiling() else { return };
    let sgd = |model: &nn::Sequential| Sgd::builder(model).lr(0.1).momentum(0.9).fused(true).build().unwrap();
    // With a momentum of 0, the kernel leaves the state alone.
    let change = |_: &nn::Sequential, opt: &mut Sgd, step: usize| {
        if step > 0 && step.is_multiple_of(5) {
            opt.set_momentum(0, if step == 5 { 0.0 } else { 0.9 }).unwrap();
        }
    };
    follows_changes(mlp, sgd, change, |step| batch(step as i64), 16, strict());
}

/// Trains three steps uncompiled, ten in each way, and the rest in the faster way: the result does not depend on which
/// way that is.
#[test]
fn the_way_that_auto_finds_faster() {
    let Some(_alone) = crate::compiling() else { return };
    let followed = follows(mlp, adamw, |step| batch(step as i64), 30, Options { auto: true, ..strict() });
    let why = followed.why_eager;
    assert!(why.as_ref().is_none_or(|why| why.contains("it runs uncompiled from now on")), "{why:?}");
}

/// Steps of options that were replaced are forgotten: they take no room from steps of the new options.
#[test]
fn options_that_change_often_leave_steps_compiled() {
    let Some(_alone) = crate::compiling() else { return };
    let model = mlp();
    let mut opt = AdamW::builder(&model).build().unwrap();
    let calls = std::cell::Cell::new(0);
    let mut step = compile::step(&model, |batch| {
        calls.set(calls.get() + 1);
        Ok(model.forward(&batch[0])?.cross_entropy_for_logits(&batch[1]))
    })
    .options(Options { shapes: 1, ..strict() });
    for _ in 0..4 {
        opt.group_mut(0).unwrap().weight_decay(0.01).apply().unwrap();
        (0..6).for_each(|number| drop(step.run(&mut opt, &batch(number)).unwrap()));
    }
    assert_eq!((calls.get(), step.why_eager()), (4 * 3, None));
}

/// As by a schedule of the weight decay: no step comes often enough to be compiled, which is said.
#[test]
fn options_that_change_at_each_step_are_named() {
    let _alone = crate::alone();
    let model = mlp();
    let mut opt = AdamW::builder(&model).build().unwrap();
    let loss = |batch: &[Tensor]| -> LossResult { Ok(model.forward(&batch[0])?.cross_entropy_for_logits(&batch[1])) };
    let mut train = |options: Options| {
        let mut step = compile::step(&model, loss).options(options);
        let error = (0..12).find_map(|number| {
            opt.group_mut(0).unwrap().weight_decay(0.01 * number as f64).apply().unwrap();
            step.run(&mut opt, &batch(number)).err()
        });
        (error.map(|error| error.to_string()), step.why_eager().map(str::to_owned))
    };
    let (error, why) = train(Options { verbose: false, ..Options::default() });
    assert!(error.is_none() && why.is_some_and(|why| why.contains("may change at each step")));
    let (error, _) = train(Options { verbose: false, ..strict() });
    assert!(error.is_some_and(|error| error.contains("may change at each step")));
}

#[test]
fn the_momentum_of_batch_normalization() {
    let Some(_alone) = crate::compiling() else { return };
    let norm = || nn::BatchNorm1d::new(20).unwrap();
    let sgd = |norm: &nn::BatchNorm1d| Sgd::builder(norm).lr(0.1).fused(true).build().unwrap();
    let change = |norm: &nn::BatchNorm1d, _: &mut Sgd, step: usize| {
        norm.momentum.set(Some(if step < 4 { 0.1 } else { 0.5 }));
    };
    follows_changes(norm, sgd, change, |step| batch(step as i64), 8, strict());
}

/// The closure uses a second model, which has dropout while it is in training mode.
#[test]
fn the_mode_of_a_teacher_that_is_watched() {
    let Some(_alone) = crate::compiling() else { return };
    let (student, teacher) = (nn::Linear::new(20, 5).unwrap(), mlp());
    let difference = |batch: &[Tensor]| -> compile::LossResult {
        let wanted = tch::no_grad(|| teacher.forward(&batch[0]))?;
        Ok((student.forward(&batch[0])? - wanted).square().mean(Kind::Float))
    };
    let mut opt = Sgd::builder(&student).lr(0.1).fused(true).build().unwrap();
    let mut step = compile::step(&student, difference).watch(&teacher).options(strict());
    let mut forward =
        compile::forward(&student, |inputs| Ok(vec![difference(inputs)?])).watch(&teacher).options(strict());
    for number in 0..10 {
        teacher.set_training(number >= 5);
        let [x, _] = batch(number);
        let seeded = |run: &mut dyn FnMut() -> Tensor| {
            tch::manual_seed(number);
            run().double_value(&[])
        };
        let expected = seeded(&mut || difference(&[x.shallow_clone()]).unwrap());
        let inferred = seeded(&mut || forward.run(&[x.shallow_clone()]).unwrap().remove(0));
        let trained = seeded(&mut || step.run(&mut opt, &[x.shallow_clone()]).unwrap());
        for found in [inferred, trained] {
            assert!((found - expected).abs() <= 1e-5 * expected, "step {number}: {found}, but {expected} uncompiled");
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
