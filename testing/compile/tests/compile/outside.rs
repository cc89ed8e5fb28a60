//! External tensors of a step that change between its runs.

use std::cell::Cell;

use overdrive::core::Module;
use overdrive::nn::{self as nn, sequential};
use overdrive::optim::{AdamW, Sgd};
use overdrive_compile as compile;
use overdrive_compile::{LossResult, Options};
use tch::{Device, Kind, Tensor};

use crate::beside::{follows_changes, strict};
use crate::losses::{batch, mlp};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Gives a tensor the memory of `data`.
fn replace(tensor: &Tensor, data: &Tensor) {
    tensor.shallow_clone().f_set_data(&data.detach()).unwrap();
}

#[test]
fn weights_that_come_to_share_memory_train_as_tied_ones() {
    let Some(_alone) = crate::compiling() else { return };
    let twice = || sequential![nn::Linear::new(6, 6).unwrap(), nn::Relu, nn::Linear::new(6, 6).unwrap()];
    let sgd = |model: &nn::Sequential| Sgd::builder(model).lr(0.5).momentum(0.9).fused(true).build().unwrap();
    let tie = |model: &nn::Sequential, _: &mut Sgd, step: usize| {
        let params = model.named_parameters();
        match step {
            // The tensor gets memory of its own, and the step goes on.
            5 => replace(params[0].tensor(), &params[0].tensor().copy()),
            7 => replace(params[2].tensor(), params[0].tensor()),
            _ => {}
        }
    };
    let batch = |_| [Tensor::randn([16, 6], FLOAT), Tensor::randint(6, [16], (Kind::Int64, Device::Cpu))];
    let quiet = Options { verbose: false, ..Options::default() };
    let followed = follows_changes(twice, sgd, tie, batch, 14, quiet.clone());
    let why = followed.why_eager.expect("it is refused");
    assert!(why.contains("share memory"), "{why}");
    let followed = follows_changes(twice, sgd, |model, opt, step| tie(model, opt, step.min(6)), batch, 14, strict());
    assert_eq!((followed.calls, followed.why_eager), (3, None));
}

#[test]
fn a_captured_tensor_of_another_shape_or_dtype_is_another_step() {
    let Some(_alone) = crate::compiling() else { return };
    let model = nn::Linear::new(4, 2).unwrap();
    model.eval();
    let (scale, calls) = (Tensor::ones([2], FLOAT), Cell::new(0));
    let scaled = |inputs: &[Tensor]| -> Result<Vec<Tensor>, compile::BoxError> {
        calls.set(calls.get() + 1);
        Ok(vec![model.forward(&inputs[0])? * &scale])
    };
    let mut forward = compile::forward(&model, scaled).options(strict());
    for number in 0..12 {
        match number {
            4 => replace(&scale, &Tensor::ones([2], (Kind::Double, Device::Cpu))),
            8 => replace(&scale, &(Tensor::ones([1], FLOAT) * 2.0)),
            _ => {}
        }
        let x = Tensor::randn([3, 4], FLOAT);
        let expected = tch::no_grad(|| model.forward(&x).unwrap() * &scale);
        let found = forward.run(&[x]).unwrap().remove(0);
        assert_eq!(found.kind(), expected.kind());
        assert!(found.allclose(&expected, 1e-5, 1e-6, false), "step {number}");
    }
    assert_eq!((calls.get(), forward.why_eager()), (3 * 2, None));
}

#[test]
fn a_captured_tensor_of_another_shape_each_time_is_named() {
    let _alone = crate::alone();
    let model = nn::Linear::new(4, 2).unwrap();
    let scale = Tensor::ones([2], FLOAT);
    let mut forward = compile::forward(&model, |inputs| Ok(vec![model.forward(&inputs[0])? * &scale]))
        .options(Options { verbose: false, ..strict() });
    let error = (0..3).find_map(|number| {
        replace(&scale, &Tensor::ones([number % 2 + 1], FLOAT));
        forward.run(&[Tensor::ones([3, 4], FLOAT)]).err()
    });
    let text = error.expect("a refusal").to_string();
    assert!(text.contains("shape [1]") && text.contains("then a Float tensor of shape [2]"), "{text}");
    assert!(text.contains("pass it in the batch"), "{text}");
}

/// libtorch's fused AdamW does not increment `Tensor._version` for what it writes; compiled steps do.
#[test]
fn a_backward_pass_over_weights_that_a_compiled_step_has_changed_is_an_error() {
    let Some(_alone) = crate::compiling() else { return };
    let model = mlp();
    let mut opt = AdamW::builder(&model).build().unwrap();
    let loss = |batch: &[Tensor]| -> LossResult { Ok(model.forward(&batch[0])?.cross_entropy_for_logits(&batch[1])) };
    let calls = Cell::new(0);
    let mut step = compile::step(&model, |batch| {
        calls.set(calls.get() + 1);
        loss(batch)
    })
    .options(strict());
    (0..3).for_each(|number| drop(step.run(&mut opt, &batch(number)).unwrap()));
    for number in 3..6 {
        let before = loss(&batch(number)).unwrap();
        let _ = step.run(&mut opt, &batch(number)).unwrap();
        let error = before.f_backward().expect_err("the weights have changed").to_string();
        assert!(error.contains("modified by an inplace operation"), "step {number}: {error}");
    }
    assert_eq!(calls.get(), 3);
}

/// Batch normalization does not increment the version of its statistics, and its backward pass keeps them.
#[test]
fn running_statistics_may_move_before_a_backward_pass() {
    let Some(_alone) = crate::compiling() else { return };
    let model = sequential![nn::Linear::new(20, 8).unwrap(), nn::BatchNorm1d::new(8).unwrap()];
    let loss = |batch: &[Tensor]| -> LossResult { Ok(model.forward(&batch[0])?.square().mean(Kind::Float)) };
    let mut loss_of = compile::loss(&model, loss).options(strict());
    for number in 0..5 {
        let before = loss(&batch(number)).unwrap();
        let _ = loss_of.run(&batch(number)).unwrap();
        before.f_backward().unwrap();
    }
}
