//! What happens to a compiled step while its surroundings change.

use overdrive::core::{Module, Optimizer, Stateful};
use overdrive::nn;
use overdrive::optim::{AdamW, Lion};
use overdrive_compile as compile;
use overdrive_compile::{CompileError, Options};
use tch::{Kind, Tensor};

use crate::beside::{follows, strict};
use crate::losses::{batch, mlp};

fn close(found: f64, expected: f64) {
    assert!((found - expected).abs() <= 1e-5 * expected.abs(), "{found}, but {expected} uncompiled");
}

/// One uncompiled step with AdamW.
fn plain_step(model: &nn::Sequential, opt: &mut AdamW, [x, y]: &[Tensor; 2]) -> f64 {
    let loss = model.forward(x).unwrap().cross_entropy_for_logits(y);
    loss.backward();
    opt.step().unwrap();
    opt.zero_grad().unwrap();
    loss.double_value(&[])
}

#[test]
fn a_state_goes_from_plain_steps_to_compiled_ones_and_back() {
    let Some(_alone) = crate::compiling() else { return };
    let (plain, compiled) = (mlp(), mlp());
    let mut plain_opt = AdamW::builder(&plain).build().unwrap();
    let mut opt = AdamW::builder(&compiled).build().unwrap();
    let mut step =
        compile::step(&compiled, |batch| Ok(compiled.forward(&batch[0])?.cross_entropy_for_logits(&batch[1])))
            .options(strict());
    let mut both = |number: i64, step_of: &mut dyn FnMut(&mut AdamW, &[Tensor; 2]) -> f64, opt: &mut AdamW| {
        let batch = batch(number);
        tch::manual_seed(number);
        let expected = plain_step(&plain, &mut plain_opt, &batch);
        tch::manual_seed(number);
        close(step_of(opt, &batch), expected);
        plain_opt.state_dict().unwrap()
    };
    let mut compiled_step = |opt: &mut AdamW, batch: &[Tensor; 2]| step.run(opt, batch).unwrap().double_value(&[]);
    let saved = (0..8).map(|number| both(number, &mut compiled_step, &mut opt)).last().unwrap();
    // Loads the state of the uncompiled run into the compiled one.
    opt.load_state_dict(&saved).unwrap();
    (8..16).for_each(|number| drop(both(number, &mut compiled_step, &mut opt)));
    // The state of the compiled run goes on uncompiled.
    let mut plain_steps = |opt: &mut AdamW, batch: &[Tensor; 2]| plain_step(&compiled, opt, batch);
    (16..20).for_each(|number| drop(both(number, &mut plain_steps, &mut opt)));
}

#[test]
fn batches_of_another_shape_are_recorded_for_themselves_and_others_refused() {
    let Some(_alone) = crate::compiling() else { return };
    let model = mlp();
    model.eval();
    let options = Options { shapes: 1, verbose: false, ..Options::default() };
    let run = |inputs: &[Tensor]| Ok(vec![model.forward(&inputs[0])?]);
    let mut forward = compile::forward(&model, run).options(options.clone());
    let [x, _] = batch(0);
    for input in [x.shallow_clone(), x.shallow_clone(), x.shallow_clone(), x.narrow(0, 0, 3), x.narrow(1, 0, 20)] {
        let expected = tch::no_grad(|| model.forward(&input).unwrap());
        assert!(forward.run(&[input]).unwrap()[0].allclose(&expected, 1e-5, 1e-6, false));
    }
    let why = forward.why_eager().unwrap_or_default();
    assert!(why.contains("`Options::shapes` allows 1 compiled steps"), "{why}");
    let error = forward.run(&[x.narrow(1, 0, 7)]).unwrap_err();
    assert!(matches!(error, CompileError::Step(_)), "the layer's own error: {error}");
    let mut forward = compile::forward(&model, run).options(Options { strict: true, ..options });
    (0..3).for_each(|_| drop(forward.run(&[x.shallow_clone()]).unwrap()));
    let error = forward.run(&[x.narrow(1, 0, 20).unsqueeze(0)]).unwrap_err();
    assert!(matches!(error, CompileError::NoRoom { shapes: 1 }), "{error}");
}

#[test]
fn a_model_that_changes_is_recorded_anew() {
    let Some(_alone) = crate::compiling() else { return };
    let model = mlp();
    model.eval();
    let mut loss_of = compile::loss(&model, |batch| Ok(model.forward(&batch[0])?.cross_entropy_for_logits(&batch[1])))
        .options(strict());
    let mut grads = || {
        let loss = loss_of.run(&batch(0)).unwrap();
        loss.backward();
        let defined = model.named_parameters().iter().map(|it| it.tensor().grad().defined()).collect::<Vec<_>>();
        model.named_parameters().iter().for_each(|it| it.tensor().shallow_clone().zero_grad());
        (loss.double_value(&[]), defined)
    };
    let before = (0..3).map(|_| grads()).last().unwrap();
    assert_eq!(before.1, [true; 4]);
    let first = model.named_parameters().remove(0);
    let _ = first.tensor().set_requires_grad(false);
    tch::no_grad(|| drop(first.tensor().shallow_clone().f_mul_scalar_(2.0).unwrap()));
    first.tensor().shallow_clone().f_set_data(&(first.tensor() * 2.0)).unwrap();
    let expected = model.forward(&batch(0)[0]).unwrap().cross_entropy_for_logits(&batch(0)[1]).double_value(&[]);
    for _ in 0..3 {
        close(grads().0, expected);
    }
}

#[test]
fn an_optimizer_that_is_not_fused_steps_as_ever_on_compiled_gradients() {
    let Some(_alone) = crate::compiling() else { return };
    let options = Options { verbose: false, ..Options::default() };
    let lion = |model: &nn::Sequential| Lion::builder(model).build().unwrap();
    let followed = follows(mlp, lion, |step| batch(step as i64), 8, options);
    let why = followed.why_eager.unwrap_or_default();
    assert!(why.contains("only fused updates are compiled"), "{why}");
}

#[test]
fn a_whole_step_leaves_no_gradient_and_refuses_those_of_other_tensors() {
    let Some(_alone) = crate::compiling() else { return };
    let model = mlp();
    let loss = |batch: &[Tensor]| Ok(model.forward(&batch[0])?.cross_entropy_for_logits(&batch[1]));
    let mut opt = AdamW::builder(&model).build().unwrap();
    let mut step = compile::step(&model, loss).options(strict());
    for number in 0..5 {
        (loss(&batch(number)) as compile::LossResult).unwrap().backward();
        let _ = step.run(&mut opt, &batch(number)).unwrap();
        assert!(!model.named_parameters().iter().any(|it| it.tensor().grad().defined()), "step {number}");
    }
    // The other parameters are in another optimizer.
    let first = model.named_parameters().into_iter().take(2).collect::<Vec<_>>();
    let mut opt = AdamW::builder(first).build().unwrap();
    let mut step = compile::step(&model, loss).options(strict());
    let refused = (0..3).find_map(|number| step.run(&mut opt, &batch(number)).err()).expect("a refusal").to_string();
    assert!(refused.contains("no parameter of the optimizer") && refused.contains("compile::loss"), "{refused}");
}

#[test]
fn a_model_that_is_cast_is_recorded_anew() {
    let Some(_alone) = crate::compiling() else { return };
    let model = mlp();
    model.eval();
    let mut forward = compile::forward(&model, |inputs| Ok(vec![model.forward(&inputs[0])?])).options(strict());
    for kind in [Kind::Float, Kind::Double] {
        model.to(kind).unwrap();
        let input = batch(0)[0].to_kind(kind);
        let expected = tch::no_grad(|| model.forward(&input).unwrap());
        for _ in 0..3 {
            let found = forward.run(&[input.shallow_clone()]).unwrap().remove(0);
            assert!(found.kind() == kind && found.allclose(&expected, 1e-5, 1e-6, false));
        }
    }
}

#[test]
fn gradients_reach_an_input_that_requires_them_and_are_scaled_by_that_of_the_loss() {
    let Some(_alone) = crate::compiling() else { return };
    let model = nn::Linear::new(4, 2).unwrap();
    let mut loss_of = compile::loss(&model, |batch| Ok(model.forward(&batch[0])?.square().mean(Kind::Float)));
    loss_of = loss_of.options(strict());
    for number in 0..4 {
        tch::manual_seed(number);
        let x = Tensor::randn([3, 4], (Kind::Float, tch::Device::Cpu)).set_requires_grad(true);
        let other = x.detach().copy().set_requires_grad(true);
        (loss_of.run(&[x.shallow_clone()]).unwrap() * 3.0).backward();
        (model.forward(&other).unwrap().square().mean(Kind::Float) * 3.0).backward();
        assert!(x.grad().allclose(&other.grad(), 1e-5, 1e-7, false), "step {number}");
    }
}
