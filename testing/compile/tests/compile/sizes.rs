//! Batches of several sizes.

use std::cell::Cell;

use overdrive::nn::{self as nn, Forward, sequential};
use overdrive::optim::AdamW;
use overdrive::prelude::*;
use overdrive_compile as compile;
use overdrive_compile::Options;

use crate::beside::{follows, strict};
use crate::losses::mlp;
use crate::models::{gpt, tokens};

/// Runs a compiled step on batches of these sizes. Returns how often its closure is called.
fn calls<M: Module + Forward>(
    model: impl Fn() -> M,
    batch: fn(i64) -> [Tensor; 2],
    sizes: &[i64],
    options: Options,
) -> usize {
    let adam = |model: &M| AdamW::builder(model).build().unwrap();
    follows(model, adam, |step| batch(sizes[step]), sizes.len(), options).calls
}

fn numbers(size: i64) -> [Tensor; 2] {
    [Tensor::randn([size, 20], (Kind::Float, Device::Cpu)), Tensor::randint(5, [size], (Kind::Int64, Device::Cpu))]
}

/// The first two sizes are recorded twice each and compiled. Each further size is recorded once, to check that it is
/// the same step.
#[test]
fn a_second_size_is_compiled_for_all_sizes() {
    let Some(_alone) = crate::compiling() else { return };
    let sizes = [16, 16, 16, 16, 7, 7, 7, 7, 2, 2, 2, 33, 33, 33, 16, 7];
    assert_eq!(calls(mlp, numbers, &sizes, Options { shapes: 2, ..strict() }), 3 + 3 + 2 + 2);
}

#[test]
fn a_batch_of_one_is_compiled_for_itself() {
    let Some(_alone) = crate::compiling() else { return };
    let sizes = [16, 16, 16, 7, 7, 7, 1, 1, 1, 1, 1];
    assert_eq!(calls(mlp, numbers, &sizes, strict()), 3 + 3 + 3);
    // A batch of one does not prevent that others are compiled for all sizes.
    let sizes = [1, 1, 1, 7, 7, 7, 16, 16, 16, 9, 9, 9];
    assert_eq!(calls(mlp, numbers, &sizes, strict()), 3 + 3 + 3 + 2);
    // Here it takes the only room that there is.
    let options = Options { shapes: 1, ..Options::default() };
    assert_eq!(calls(mlp, numbers, &[1, 1, 1, 1, 7, 7, 7, 7], options), 3 + 4);
}

#[test]
fn sizes_are_compiled_each_for_itself_on_demand() {
    let Some(_alone) = crate::compiling() else { return };
    let options = Options { dynamic: false, shapes: 1, ..Options::default() };
    assert_eq!(calls(mlp, numbers, &[16, 16, 16, 7, 7, 7, 7], options), 3 + 4);
}

#[test]
fn a_gpt_trains_on_batches_of_any_size() {
    let Some(_alone) = crate::compiling() else { return };
    let sizes = [4, 4, 4, 4, 3, 3, 3, 3, 2, 2, 2, 6, 6, 6, 4, 3];
    assert_eq!(calls(gpt, tokens, &sizes, strict()), 3 + 3 + 2 + 2);
}

#[test]
fn convolutions_and_batch_normalization_train_on_batches_of_any_size() {
    let Some(_alone) = crate::compiling() else { return };
    let cnn = || {
        sequential![
            // Without a bias: normalization cancels it, so that its gradient is rounding error, which Adam turns into a
            // step.
            nn::Conv2d::builder(3, 8, 3).padding(1).bias(false).build().unwrap(),
            nn::BatchNorm2d::new(8).unwrap(),
            nn::Relu,
            nn::MaxPool2d::new(2),
            nn::Flatten::default(),
            nn::Linear::new(8 * 16, 5).unwrap()
        ]
    };
    let images = |size: i64| {
        let labels = Tensor::randint(5, [size], (Kind::Int64, Device::Cpu));
        [Tensor::randn([size, 3, 8, 8], (Kind::Float, Device::Cpu)), labels]
    };
    let sizes = [8, 8, 8, 8, 5, 5, 5, 5, 3, 3, 3, 11, 11, 11, 8, 5];
    assert_eq!(calls(cnn, images, &sizes, strict()), 3 + 3 + 2 + 2);
}

/// The first dimension of the second tensor is not the size of the batch, so another one makes another step.
#[test]
fn other_tensors_of_a_batch_may_have_other_sizes() {
    let Some(_alone) = crate::compiling() else { return };
    let model = nn::Linear::new(4, 2).unwrap();
    model.eval();
    let distances = |inputs: &[Tensor]| {
        let [one, other] = [model.forward(&inputs[0])?, model.forward(&inputs[1])?];
        Ok(vec![one.f_matmul(&other.f_transpose(0, 1)?)?])
    };
    let mut forward = compile::forward(&model, distances).options(Options { shapes: 2, ..strict() });
    for (size, others) in [(8, 5), (8, 5), (8, 5), (6, 5), (6, 5), (6, 5), (7, 6), (7, 6), (7, 6), (3, 5), (3, 5)] {
        let inputs = [size, others].map(|size| Tensor::randn([size, 4], (Kind::Float, Device::Cpu)));
        let expected =
            tch::no_grad(|| distances(&inputs).map_err(|error: compile::BoxError| error.to_string())).unwrap();
        assert!(forward.run(&inputs).unwrap()[0].allclose(&expected[0], 1e-4, 1e-5, false), "{size}, {others}");
    }
}

/// The differences of neighbours have b - 1 rows, which is 1 for a batch of 2.
#[test]
fn a_dimension_that_is_one_less_than_the_batch() {
    let Some(_alone) = crate::compiling() else { return };
    let model = nn::Linear::new(4, 2).unwrap();
    let calls = Cell::new(0);
    let loss = |batch: &[Tensor]| -> compile::LossResult {
        calls.set(calls.get() + 1);
        let (y, size) = (model.forward(&batch[0])?, batch[0].size()[0]);
        let neighbours = y.f_narrow(0, 1, size - 1)? - y.f_narrow(0, 0, size - 1)?;
        Ok((neighbours * y.f_narrow(0, 0, size - 1)?).square().mean(Kind::Float))
    };
    let mut loss_of = compile::loss(&model, loss).options(Options { strict: true, ..Options::default() });
    let mut expected_calls = 0;
    // A batch of 2 is not computed as one of another size, neither before nor after the package for all sizes exists.
    for (size, recorded) in [(8, 2), (8, 0), (5, 2), (5, 0), (2, 2), (2, 0), (6, 1), (3, 1), (3, 0), (8, 0)] {
        for number in 0..recorded.max(1) {
            let x = Tensor::randn([size, 4], (Kind::Float, Device::Cpu));
            let expected = loss(&[x.shallow_clone()]).unwrap().double_value(&[]);
            let found = loss_of.run(&[x]).unwrap().double_value(&[]);
            assert!(
                (found - expected).abs() <= 1e-5 * expected,
                "{size}, {number}: {found}, but {expected} uncompiled"
            );
        }
        expected_calls += recorded + recorded.max(1);
        assert_eq!(calls.get(), expected_calls, "size {size}");
    }
}

/// A loop over the samples gives another list of operators at each size.
#[test]
fn a_step_whose_operators_depend_on_the_size_is_compiled_for_each() {
    let Some(_alone) = crate::compiling() else { return };
    let model = nn::Linear::new(4, 2).unwrap();
    let calls = Cell::new(0);
    let mut loss_of = compile::loss(&model, |batch| {
        calls.set(calls.get() + 1);
        let rows: Vec<Tensor> = (0..batch[0].size()[0]).map(|row| batch[0].get(row)).collect();
        Ok(model.forward(&Tensor::stack(&rows, 0))?.square().mean(Kind::Float))
    })
    .options(strict());
    for size in [3, 3, 3, 5, 5, 5, 3, 4, 4, 4] {
        let x = Tensor::randn([size, 4], (Kind::Float, Device::Cpu));
        let expected = model.forward(&x).unwrap().square().mean(Kind::Float).double_value(&[]);
        let found = loss_of.run(&[x]).unwrap().double_value(&[]);
        assert!((found - expected).abs() <= 1e-5 * expected, "{found}, but {expected} uncompiled");
    }
    assert_eq!(calls.get(), 2 + 2 + 2);
}
