//! Indices that are out of range. libtorch's operators refuse them, and so do compiled steps.

use std::cell::Cell;

use overdrive::core::{Entry, Module, Optimizer, Stateful};
use overdrive::nn::{self as nn, sequential};
use overdrive::optim::{AdamW, AveragedModel, Averaging, Sgd};
use overdrive_compile as compile;
use overdrive_compile::{CompileError, Options};
use tch::{Device, Kind, Tensor};

use crate::models::gpt;

const INT64: (Kind, Device) = (Kind::Int64, Device::Cpu);

fn strict() -> Options {
    Options { strict: true, ..Options::default() }
}

/// All parameters and buffers of a model.
fn values(model: &impl Module) -> Vec<Tensor> {
    let params = model.named_parameters().into_iter().map(|it| it.tensor().detach().copy());
    params.chain(model.named_buffers().into_iter().map(|(_, buffer)| buffer.copy())).collect()
}

/// As `cross_entropy_for_logits`, which panics on an error.
fn cross_entropy(y: &Tensor, labels: &Tensor) -> compile::LossResult {
    Ok(y.f_cross_entropy_loss::<Tensor>(labels, None, tch::Reduction::Mean, -100, 0.0)?)
}

/// A model with an embedding and batch normalization, so that a step writes to buffers too.
fn bag() -> nn::Sequential {
    sequential![
        nn::Embedding::new(50, 8).unwrap(),
        nn::Flatten::default(),
        nn::BatchNorm1d::new(16).unwrap(),
        nn::Linear::new(16, 5).unwrap()
    ]
}

/// A step with labels or tokens out of range gives libtorch's own error, and changes nothing that a compiled step
/// writes. That holds on several threads too, where an exception would end the process.
#[test]
fn labels_and_tokens_out_of_range_are_errors_and_change_nothing() {
    let Some(_alone) = crate::compiling() else { return };
    tch::manual_seed(1);
    let model = bag();
    let mut opt = AdamW::builder(&model).build().unwrap();
    let mut step =
        compile::step(&model, |batch| cross_entropy(&model.forward(&batch[0])?, &batch[1])).options(strict());
    // Enough rows for several threads.
    let batch = || [Tensor::randint(50, [4096, 2], INT64), Tensor::randint(5, [4096], INT64)];
    (0..4).for_each(|_| drop(step.run(&mut opt, &batch()).unwrap()));
    for (which, value) in [(0, -1), (0, 50), (0, i64::MIN), (1, -1), (1, 5), (1, 1 << 40)] {
        let batch = batch();
        let _ = batch[which].view(-1).get(4000).fill_(value);
        let before = values(&model);
        let error = step.run(&mut opt, &batch).expect_err("a refusal");
        assert!(matches!(&error, CompileError::Step(_)), "{error}");
        let text = error.to_string();
        assert!(text.contains("out of") || text.contains("out of bounds"), "{which}, {value}: {text}");
        // The closure counts the batch before it fails, so `num_batches_tracked` and the running statistics are those
        // of an eager step.
        let params = model.named_parameters().len();
        assert!(values(&model)[..params].iter().zip(&before).all(|(now, before)| now == before), "{which}, {value}");
    }
    assert!(step.run(&mut opt, &batch()).unwrap().double_value(&[]).is_finite());
}

/// A step with a label out of range, whose gradients would also be infinite, fails as it would uncompiled. Weights, the
/// optimizer's state and buffers then go on as in an uncompiled loop.
fn goes_on_as_uncompiled<O: Optimizer>(optimizer: impl Fn(&nn::Sequential) -> O) {
    let Some(_alone) = crate::compiling() else { return };
    tch::manual_seed(1);
    let (plain, compiled) = (bag(), bag());
    let pairs = compiled.named_parameters().into_iter().zip(plain.named_parameters());
    tch::no_grad(|| pairs.for_each(|(own, other)| own.tensor().shallow_clone().copy_(other.tensor())));
    let loss = |model: &nn::Sequential, batch: &[Tensor]| -> compile::LossResult {
        Ok(cross_entropy(&model.forward(&batch[0])?, &batch[1])? * &batch[2])
    };
    let (mut plain_opt, mut opt) = (optimizer(&plain), optimizer(&compiled));
    let mut step = compile::step(&compiled, |batch| loss(&compiled, batch)).options(strict());
    for number in 0..9 {
        let is_bad = number == 4 || number == 6;
        let factor = Tensor::from(if is_bad { f32::INFINITY } else { 1.0 });
        let batch = [Tensor::randint(50, [64, 2], INT64), Tensor::randint(5, [64], INT64), factor];
        if is_bad {
            let _ = batch[1].get(7).fill_(5);
        }
        let expected = loss(&plain, &batch).map(|loss| {
            plain_opt.zero_grad().unwrap();
            loss.backward();
            plain_opt.step().unwrap();
        });
        assert_eq!((step.run(&mut opt, &batch).is_err(), expected.is_err()), (is_bad, is_bad), "step {number}");
        let (found, expected) = (values(&compiled), values(&plain));
        let mut pairs = found.iter().zip(&expected);
        assert!(pairs.all(|(one, other)| one.allclose(other, 1e-4, 1e-6, false)), "step {number}");
    }
}

#[test]
fn adamw_goes_on_after_a_label_out_of_range() {
    goes_on_as_uncompiled(|model| AdamW::builder(model).build().unwrap());
}

#[test]
fn sgd_goes_on_after_a_label_out_of_range() {
    goes_on_as_uncompiled(|model| Sgd::builder(model).lr(0.1).momentum(0.9).fused(true).build().unwrap());
}

/// A step with a label out of range, whose gradients would also be infinite, leaves the weights, the optimizer's state
/// and the averages of the weights as they were, to the bit.
fn stays_as_it_was(kind: Kind, with_averages: bool) {
    let Some(_alone) = crate::compiling() else { return };
    tch::manual_seed(1);
    let model =
        sequential![nn::Embedding::new(50, 8).unwrap(), nn::Flatten::default(), nn::Linear::new(16, 5).unwrap()];
    model.to(kind).unwrap();
    let opt = &mut AdamW::builder(&model).lr(0.01).build().unwrap();
    let averages = &mut AveragedModel::new(&model, Averaging::Ema { decay: 0.5 }).unwrap();
    let calls = Cell::new(0);
    let loss = |batch: &[Tensor]| {
        calls.set(calls.get() + 1);
        Ok(cross_entropy(&model.forward(&batch[0])?, &batch[1])? * &batch[2])
    };
    let mut step = compile::step(&model, loss).options(strict());
    let mut run = |opt: &mut AdamW, averages: &mut AveragedModel, batch: &[Tensor]| match with_averages {
        true => step.run_and_average(opt, averages, batch),
        false => step.run(opt, batch),
    };
    let batch = |factor: f32| {
        [Tensor::randint(50, [64, 2], INT64), Tensor::randint(5, [64], INT64), Tensor::from(factor).to_kind(kind)]
    };
    let kept = |opt: &AdamW, averages: &AveragedModel| {
        let state = opt.state_dict().unwrap();
        let state = state.iter().filter_map(|(_, entry)| match entry {
            Entry::Tensor(tensor) => Some(tensor.copy()),
            _ => None,
        });
        let averaged = averages.averages().unwrap().into_iter().map(|it| it.tensor().copy());
        let averaged: Vec<_> = averaged.filter(|_| with_averages).collect();
        values(&model).into_iter().chain(state).chain(averaged).collect::<Vec<_>>()
    };
    (0..6).for_each(|_| drop(run(opt, averages, &batch(1.0)).unwrap()));
    for _ in 0..2 {
        let (before, uncompiled) = (kept(opt, averages), calls.get());
        assert!(before.len() > 3 * model.named_parameters().len(), "the state is there");
        let bad = batch(f32::INFINITY);
        let _ = bad[1].get(7).fill_(5);
        let error = run(opt, averages, &bad).expect_err("a refusal");
        assert!(error.to_string().contains("out of"), "{error}");
        assert_eq!(kept(opt, averages), before);
        let _ = run(opt, averages, &batch(1.0)).unwrap();
        assert!(kept(opt, averages).iter().zip(&before).all(|(now, before)| now != before), "a good step changes all");
        assert_eq!(calls.get(), uncompiled + 1, "good steps run compiled");
    }
}

#[test]
fn averages_stay_as_they_were_after_a_label_out_of_range() {
    stays_as_it_was(Kind::Float, true);
}

#[test]
fn weights_of_bfloat16_stay_as_they_were_after_a_label_out_of_range() {
    stays_as_it_was(Kind::BFloat16, false);
}

/// -100 means that a row has no label. Here it replaces labels within the step.
#[test]
fn labels_that_are_ignored_stay_so() {
    let Some(_alone) = crate::compiling() else { return };
    let model = nn::Linear::new(8, 5).unwrap();
    let loss = |batch: &[Tensor]| -> compile::LossResult {
        let masked = batch[1].f_where_self(&batch[2], &batch[1].full_like(-100))?;
        Ok(model.forward(&batch[0])?.f_cross_entropy_loss::<Tensor>(&masked, None, tch::Reduction::Mean, -100, 0.1)?)
    };
    let mut loss_of = compile::loss(&model, loss).options(strict());
    for _ in 0..5 {
        let mask = Tensor::rand([32], (Kind::Float, Device::Cpu)).gt(0.3);
        let batch = [Tensor::randn([32, 8], (Kind::Float, Device::Cpu)), Tensor::randint(5, [32], INT64), mask];
        let expected = loss(&batch).unwrap().double_value(&[]);
        let found = loss_of.run(&batch).unwrap().double_value(&[]);
        assert!((found - expected).abs() <= 1e-5 * expected, "{found}, but {expected} uncompiled");
    }
}

/// Indices that the step computes are checked too. For `take`, negative ones count from the end.
#[test]
fn computed_indices_are_checked_and_those_from_the_end_are_not_refused() {
    let Some(_alone) = crate::compiling() else { return };
    let model = nn::Linear::new(4, 4).unwrap();
    model.eval();
    let pick = |inputs: &[Tensor]| -> Result<Vec<Tensor>, compile::BoxError> {
        let y = model.forward(&inputs[0])?;
        let computed = &inputs[1] * 2 - 1;
        Ok(vec![y.f_gather(1, &computed, false)?, y.f_take(&inputs[2])?])
    };
    let mut picked = compile::forward(&model, pick).options(strict());
    let x = Tensor::randn([6, 4], (Kind::Float, Device::Cpu));
    let inputs = |column: i64, place: i64| {
        [x.shallow_clone(), Tensor::full([6, 1], column, INT64), Tensor::from_slice(&[place])]
    };
    for (column, place) in [(1, 0), (1, 5), (2, -1), (2, -24), (1, 23)] {
        let expected = tch::no_grad(|| pick(&inputs(column, place))).unwrap();
        let found = picked.run(&inputs(column, place)).unwrap();
        assert!(
            expected.iter().zip(&found).all(|(one, other)| one.allclose(other, 1e-5, 1e-6, false)),
            "{column}, {place}"
        );
    }
    for (column, place) in [(0, 0), (3, 0), (1, 24), (1, -25)] {
        let text = picked.run(&inputs(column, place)).expect_err("a refusal").to_string();
        assert!(text.contains("out of"), "{column}, {place}: {text}");
    }
}

#[test]
fn a_gpt_refuses_a_token_that_it_does_not_have() {
    let Some(_alone) = crate::compiling() else { return };
    let model = gpt();
    let mut opt = AdamW::builder(&model).build().unwrap();
    let mut step = compile::step(&model, |batch| {
        cross_entropy(&model.forward(&batch[0])?.flatten(0, -2), &batch[1].flatten(0, -1))
    })
    .options(strict());
    (0..4).for_each(|_| drop(step.run(&mut opt, &crate::models::tokens(4)).unwrap()));
    let before = values(&model);
    for token in [-1, 64] {
        let batch = crate::models::tokens(4);
        let _ = batch[0].view(-1).get(7).fill_(token);
        let text = step.run(&mut opt, &batch).expect_err("a refusal").to_string();
        assert!(text.contains("out of range"), "{text}");
        assert_eq!(values(&model), before);
    }
}
