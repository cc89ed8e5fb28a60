//! Steps compared with written-out formulas, saved states, and inputs that the optimizers refuse.

mod arithmetic;
mod averaged;
mod clip;
mod eight_bit;
mod groups;
mod in_backward;
mod later_groups;
mod lbfgs;
mod low_precision;
mod options;
mod schedule_free;
mod sparse;
mod state;
mod wrappers;

use overdrive_core::{GradScale, Optimizer, OptimizerError};
use overdrive_optim::{AdamW, Sgd};
use tch::{Device, Kind, Tensor};

const CPU: Device = Device::Cpu;
const DOUBLE: (Kind, Device) = (Kind::Double, CPU);

/// The same numbers each time, without libtorch's random generator, which the tests of a process share.
fn params(n: i64) -> Vec<Tensor> {
    let numbers = |size: i64| (Tensor::arange(2 * size, DOUBLE) * 0.7 + size as f64).sin().reshape([size, 2]);
    (1..=n).map(|size| numbers(size).set_requires_grad(true)).collect()
}

/// Gradients that differ from step to step; every third parameter gets none on odd steps.
fn set_grads(params: &[Tensor], step: i64) {
    for (index, param) in params.iter().enumerate() {
        if step % 2 == 1 && index % 3 == 2 {
            continue;
        }
        (param * (step as f64 * 0.3 + index as f64 - 1.0)).square().sum(Kind::Double).backward();
    }
}

fn assert_close(ours: &Tensor, expected: &Tensor, context: &str) {
    assert!(ours.allclose(expected, 1e-12, 1e-14, false), "{context}: {ours} {expected}");
}

#[test]
fn zero_grad_frees_the_gradients() {
    let ours = params(2);
    let mut opt = Sgd::builder(&ours).build().unwrap();
    set_grads(&ours, 0);
    opt.zero_grad().unwrap();
    assert!(!ours[0].grad().defined());
    let before = ours[0].copy();
    opt.step().unwrap();
    assert_close(&ours[0], &before, "no gradient, no step");
}

#[test]
fn a_scaled_step_unscales_and_skips_by_the_flag() {
    let scale = Tensor::from(8f32);
    for (flag, moves) in [(0f32, true), (1f32, false)] {
        let found_inf = Tensor::from(flag);
        let (plain, scaled) = (params(3), params(3));
        let opt = |params: &[Tensor]| AdamW::builder(params).build().unwrap();
        let (mut plain_opt, mut scaled_opt) = (opt(&plain), opt(&scaled));
        assert!(scaled_opt.takes_grad_scale());
        // Twice, so that a skipped first step must not count towards the bias correction of the second.
        for round in 0..2 {
            let found_inf = if round == 0 { found_inf.shallow_clone() } else { Tensor::from(0f32) };
            for (plain, scaled) in plain.iter().zip(&scaled) {
                plain.square().sum(Kind::Double).backward();
                (scaled.square().sum(Kind::Double) * 8.0).backward();
            }
            let before = scaled[1].copy();
            if round == 1 || moves {
                plain_opt.step().unwrap();
            }
            scaled_opt.step_scaled(GradScale { scale: Some(&scale), found_inf: &found_inf }).unwrap();
            assert_eq!(before.equal(&scaled[1]), round == 0 && !moves);
            for (plain, scaled) in plain.iter().zip(&scaled) {
                assert_close(scaled, plain, &format!("flag {flag}, round {round}"));
            }
            plain_opt.zero_grad().unwrap();
            scaled_opt.zero_grad().unwrap();
        }
    }
}

/// PyTorch 2.11 continues from uninitialised momentum here.
#[test]
fn momentum_after_a_skipped_first_step_starts_at_the_first_good_step() {
    let (skipped, fresh) = (params(2), params(2));
    let opt = |params: &[Tensor]| Sgd::builder(params).lr(0.1).momentum(0.9).build().unwrap();
    let (mut skipped_opt, mut fresh_opt) = (opt(&skipped), opt(&fresh));
    set_grads(&skipped, 0);
    skipped_opt.step_scaled(GradScale { scale: None, found_inf: &Tensor::from(1f32) }).unwrap();
    skipped_opt.zero_grad().unwrap();
    for step in 1..4 {
        for (params, opt) in [(&skipped, &mut skipped_opt), (&fresh, &mut fresh_opt)] {
            set_grads(params, step);
            opt.step_scaled(GradScale { scale: None, found_inf: &Tensor::from(0f32) }).unwrap();
            opt.zero_grad().unwrap();
        }
        for (skipped, fresh) in skipped.iter().zip(&fresh) {
            assert_close(skipped, fresh, &format!("step {step}"));
        }
    }
}

/// The kernels index parameter and gradient alike, so both need the same memory layout.
#[test]
fn gradients_with_another_layout_are_handled() {
    let numbers = Tensor::arange(6, DOUBLE).reshape([2, 3]);
    let transposed = numbers.transpose(0, 1).set_requires_grad(true);
    let plain = transposed.detach().contiguous().set_requires_grad(true);
    let factors = (Tensor::arange(6, DOUBLE) + 1.0).reshape([3, 2]);
    for param in [&transposed, &plain] {
        let mut opt = AdamW::builder([param.shallow_clone()]).lr(0.1).build().unwrap();
        for _ in 0..3 {
            (param * &factors).square().sum(Kind::Double).backward();
            opt.step().unwrap();
            opt.zero_grad().unwrap();
        }
    }
    assert_close(&transposed.contiguous(), &plain, "transposed and contiguous");
}

#[test]
fn groups_have_their_own_options_and_mixed_dtypes_step_together() {
    let single = Tensor::ones([2], (Kind::Float, CPU)).set_requires_grad(true);
    let double = Tensor::ones([2], DOUBLE).set_requires_grad(true);
    let slow = Tensor::ones([2], DOUBLE).set_requires_grad(true);
    let first = vec![single.shallow_clone(), double.shallow_clone()];
    let mut opt = Sgd::builder(first).lr(0.5).add_param_group(Sgd::group([&slow]).lr(0.25)).build().unwrap();
    assert_eq!((opt.num_groups(), opt.lr(0), opt.lr(1), opt.lr(2)), (2, Some(0.5), Some(0.25), None));
    (single.sum(Kind::Double) + double.sum(Kind::Double) + slow.sum(Kind::Double)).backward();
    opt.step().unwrap();
    assert_eq!(single.double_value(&[0]), 0.5);
    assert_eq!(double.double_value(&[1]), 0.5);
    assert_eq!(slow.double_value(&[0]), 0.75);

    assert!(matches!(opt.set_lr(2, 0.1), Err(OptimizerError::NoSuchGroup { group: 2, groups: 2 })));
    assert!(matches!(opt.set_lr(1, f64::NAN), Err(OptimizerError::InvalidOption { option: "lr", .. })));
    opt.set_lr(1, 0.0).unwrap();
    opt.step().unwrap();
    assert_eq!(slow.double_value(&[0]), 0.75);
}

/// A parameter whose gradient is sparse, as an embedding's can be.
fn with_sparse_gradient() -> Tensor {
    let weight = Tensor::ones([6, 2], DOUBLE).set_requires_grad(true);
    Tensor::embedding(&weight, &Tensor::from_slice(&[1i64, 4]), -1, false, true).sum(Kind::Double).backward();
    assert!(weight.grad().is_sparse());
    weight
}

#[test]
fn a_sparse_gradient_is_named_and_nothing_is_stepped() {
    for fused in [true, false] {
        let dense = params(2);
        set_grads(&dense, 0);
        let before: Vec<_> = dense.iter().map(|param| param.detach().copy()).collect();
        let mut opt = AdamW::builder(&dense)
            .fused(fused)
            .add_param_group(AdamW::group([with_sparse_gradient()]))
            .build()
            .unwrap();
        let error = opt.step().unwrap_err().to_string();
        assert!(error.starts_with("parameter number 2: its gradient is sparse"), "{error}");
        assert!(dense.iter().zip(&before).all(|(param, before)| param.equal(before)), "no parameter may be stepped");
    }
}
