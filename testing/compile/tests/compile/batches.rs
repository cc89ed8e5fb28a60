//! Batches of uncommon tensors, and tensors under several names.

use overdrive::core::Module;
use overdrive::nn;
use overdrive::optim::AdamW;
use overdrive_compile as compile;
use overdrive_compile::{CompileError, LossResult, Options};
use tch::{Device, Kind, Tensor};

const FLOAT: (Kind, Device) = (Kind::Float, Device::Cpu);

fn strict() -> Options {
    Options { strict: true, ..Options::default() }
}

fn quiet() -> Options {
    Options { verbose: false, ..Options::default() }
}

/// `z.conj().imag()` has its values in memory with the opposite sign.
#[test]
fn tensors_that_are_negated_lazily_have_their_values() {
    let Some(_alone) = crate::compiling() else { return };
    let model = nn::Linear::new(4, 2).unwrap();
    model.eval();
    let mut forward = compile::forward(&model, |inputs| Ok(vec![model.forward(&inputs[0])?])).options(strict());
    for number in 0..5 {
        let z = Tensor::randn([3, 4], (Kind::ComplexFloat, Device::Cpu));
        let x = if number < 3 { z.imag() } else { z.conj().imag() };
        assert_eq!(x.is_neg(), number >= 3);
        let expected = tch::no_grad(|| model.forward(&x).unwrap());
        assert!(forward.run(&[x]).unwrap()[0].allclose(&expected, 1e-5, 1e-6, false), "step {number}");
    }
}

#[test]
fn sparse_and_undefined_tensors_run_uncompiled_or_are_errors() {
    let _alone = crate::alone();
    let model = nn::Linear::new(4, 2).unwrap();
    let sparse = || Tensor::eye(4, FLOAT).to_sparse_sparse_dim(2);
    let product = |inputs: &[Tensor]| Ok(vec![inputs[0].f_mm(&inputs[1])?]);
    let dense = Tensor::randn([4, 4], FLOAT);
    let mut forward = compile::forward(&model, product).options(quiet());
    for _ in 0..3 {
        let found = forward.run(&[sparse(), dense.shallow_clone()]).unwrap();
        assert!(found[0].allclose(&dense, 1e-5, 1e-6, false));
    }
    let why = forward.why_eager().unwrap();
    assert!(why.contains("tensor 0 of the batch") && why.contains("make it dense"), "{why}");

    let mut loss_of = compile::loss(&model, |batch| Ok(model.forward(&batch[0])?.mean(Kind::Float))).options(strict());
    for unfit in [sparse(), Tensor::new()] {
        let error = loss_of.run(&[unfit]).unwrap_err();
        assert!(matches!(error, CompileError::Unfit { place: 0, .. }), "{error}");
    }
}

/// A model can have such a tensor among its buffers, the edges of a graph for instance.
#[test]
fn a_captured_sparse_tensor_is_a_reason_not_to_compile() {
    let _alone = crate::alone();
    let model = nn::Linear::new(4, 2).unwrap();
    let sparse = Tensor::eye(4, FLOAT).to_sparse_sparse_dim(2);
    let mut forward = compile::forward(&model, |inputs| Ok(vec![sparse.f_mm(&inputs[0])?])).options(quiet());
    for _ in 0..3 {
        let dense = Tensor::randn([4, 4], FLOAT);
        assert!(forward.run(&[dense.shallow_clone()]).unwrap()[0].allclose(&dense, 1e-5, 1e-6, false));
    }
    let why = forward.why_eager().unwrap();
    assert!(why.contains("make it dense"), "{why}");
}

/// The weight is used by a `detach` of it first, which has no gradient, and then itself.
#[test]
fn a_parameter_whose_detached_view_comes_first_gets_its_gradient() {
    let Some(_alone) = crate::compiling() else { return };
    let model = nn::Linear::new(4, 4).unwrap();
    let before = model.weight.detach();
    let loss = |batch: &[Tensor]| -> LossResult {
        let target = batch[0].f_matmul(&before)?;
        Ok((model.forward(&batch[0])? - target).square().mean(Kind::Float))
    };
    let mut loss_of = compile::loss(&model, loss).options(strict());
    for step in 0..4 {
        let x = Tensor::randn([3, 4], FLOAT);
        let grads = |loss: Tensor| {
            loss.backward();
            let take = |it: overdrive::core::Parameter| {
                let grad = it.tensor().grad().copy();
                it.tensor().shallow_clone().zero_grad();
                grad
            };
            model.named_parameters().into_iter().map(take).collect::<Vec<_>>()
        };
        let expected = grads(loss(&[x.shallow_clone()]).unwrap());
        let found = grads(loss_of.run(&[x]).unwrap());
        let is_close = expected.iter().zip(&found).all(|(one, other)| one.allclose(other, 1e-5, 1e-6, false));
        assert!(is_close, "step {step}");
    }
}

/// The batch is the output of an encoder. While a step is recorded, it is a leaf, which cannot be changed in place.
#[test]
fn a_batch_with_a_gradient_may_be_written_to_in_a_step_that_is_not_compiled() {
    let _alone = crate::alone();
    let (encoder, model) = (nn::Linear::new(4, 4).unwrap(), nn::Linear::new(4, 4).unwrap());
    let loss = |batch: &[Tensor]| -> LossResult {
        let mut x = batch[0].shallow_clone();
        Ok(model.forward(&x.f_relu_()?)?.square().mean(Kind::Float))
    };
    let mut loss_of = compile::loss(&model, loss).options(quiet());
    for step in 0..3 {
        let x = Tensor::randn([3, 4], FLOAT);
        let grad = |loss: Tensor| {
            loss.backward();
            let grad = encoder.weight.grad().copy();
            encoder.weight.shallow_clone().zero_grad();
            grad
        };
        let expected = grad(loss(&[encoder.forward(&x).unwrap()]).unwrap());
        let found = grad(loss_of.run(&[encoder.forward(&x).unwrap()]).unwrap());
        assert!(found.allclose(&expected, 1e-5, 1e-6, false), "step {step}");
    }
    let why = loss_of.why_eager().unwrap();
    assert!(why.contains("requires a gradient") && why.contains("in-place"), "{why}");
}

/// While the step is recorded, both are the same tensor; later they are two.
#[test]
fn a_batch_that_was_one_tensor_twice_may_be_two() {
    let Some(_alone) = crate::compiling() else { return };
    let model = nn::Linear::new(4, 4).unwrap();
    let loss = |batch: &[Tensor]| -> LossResult {
        Ok((model.forward(&batch[0])? - &batch[1] * 2.0).square().mean(Kind::Float))
    };
    let mut loss_of = compile::loss(&model, loss).options(strict());
    let leaf = || Tensor::randn([3, 4], FLOAT).set_requires_grad(true);
    for number in 0..5 {
        let one = leaf();
        let other = if number < 3 { one.shallow_clone() } else { leaf() };
        let grads = |loss: Tensor| {
            loss.backward();
            [&one, &other].map(|it| it.grad().copy())
        };
        let expected = grads(loss(&[one.shallow_clone(), other.shallow_clone()]).unwrap());
        [&one, &other].into_iter().for_each(|it| it.shallow_clone().zero_grad());
        let found = grads(loss_of.run(&[one.shallow_clone(), other.shallow_clone()]).unwrap());
        for (one, other) in expected.iter().zip(&found) {
            assert!(one.allclose(other, 1e-5, 1e-6, false), "step {number}");
        }
    }
}

/// A whole step returns no gradients, so only the loss is compiled.
#[test]
fn a_step_over_a_batch_that_requires_a_gradient_hands_it_out() {
    let Some(_alone) = crate::compiling() else { return };
    let model = nn::Linear::new(4, 4).unwrap();
    let loss = |batch: &[Tensor]| -> LossResult { Ok(model.forward(&batch[0])?.square().mean(Kind::Float)) };
    let mut opt = AdamW::builder(&model).build().unwrap();
    let mut step = compile::step(&model, loss).options(quiet());
    for number in 0..5 {
        let x = Tensor::randn([3, 4], FLOAT).set_requires_grad(true);
        let expected = Tensor::run_backward(&[loss(&[x.shallow_clone()]).unwrap()], &[&x], false, false).remove(0);
        let _ = step.run(&mut opt, &[x.shallow_clone()]).unwrap();
        let found = x.grad();
        assert!(found.defined() && found.allclose(&expected, 1e-5, 1e-7, false), "step {number}");
    }
    assert!(step.why_eager().unwrap().contains("requires a gradient"));
}

/// The recorded steps also capture their batch, which stays the same when the batch changes.
#[test]
fn a_captured_tensor_is_not_the_batch_that_it_was_at_first() {
    let Some(_alone) = crate::compiling() else { return };
    let model = nn::Linear::new(4, 4).unwrap();
    model.eval();
    let first = Tensor::randn([3, 4], FLOAT);
    let sum =
        |inputs: &[Tensor]| -> Result<Vec<Tensor>, compile::BoxError> { Ok(vec![model.forward(&inputs[0])? + &first]) };
    let mut forward = compile::forward(&model, sum).options(strict());
    for number in 0..4 {
        let x = if number < 2 { first.shallow_clone() } else { Tensor::randn([3, 4], FLOAT) };
        let expected = tch::no_grad(|| sum(&[x.shallow_clone()]).map_err(|error| error.to_string())).unwrap();
        assert!(forward.run(&[x]).unwrap()[0].allclose(&expected[0], 1e-5, 1e-6, false), "step {number}");
    }
}

/// The step writes to its batch. Later the batch has the same tensor twice, so that the step reads what it has written.
#[test]
fn a_batch_that_is_written_under_another_name_runs_uncompiled() {
    let Some(_alone) = crate::compiling() else { return };
    let model = nn::Linear::new(4, 4).unwrap();
    model.eval();
    let work = |inputs: &[Tensor]| -> Result<Vec<Tensor>, compile::BoxError> {
        let _ = inputs[0].shallow_clone().f_fill_(3.0)?;
        Ok(vec![model.forward(&inputs[0])? + &inputs[1]])
    };
    let mut forward = compile::forward(&model, work).options(strict());
    for number in 0..5 {
        let one = Tensor::randn([3, 4], FLOAT);
        let other = if number < 3 { Tensor::randn([3, 4], FLOAT) } else { one.view([3, 4]) };
        let found = forward.run(&[one.shallow_clone(), other.shallow_clone()]).unwrap();
        let expected = tch::no_grad(|| work(&[one, other]).map_err(|error| error.to_string())).unwrap();
        assert!(found[0].allclose(&expected[0], 1e-5, 1e-6, false), "step {number}");
    }
}
