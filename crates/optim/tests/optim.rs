//! Fused steps against the same arithmetic written out, and what the optimizers refuse.

use overdrive_core::{GradScale, Optimizer, OptimizerError};
use overdrive_optim::{AdamW, Sgd, clip_grad_norm_};
use tch::{Device, Kind, Tensor};

const CPU: Device = Device::Cpu;
const DOUBLE: (Kind, Device) = (Kind::Double, CPU);

/// The same numbers each time, without libtorch's generator, which the tests of a process share.
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
fn adamw_is_its_papers_arithmetic_where_some_parameters_lack_gradients() {
    let (lr, beta1, beta2, eps, decay) = (0.01f64, 0.8f64, 0.95f64, 1e-6f64, 0.1f64);
    for amsgrad in [false, true] {
        let ours = params(4);
        let mut opt = AdamW::builder(&ours);
        opt = opt.lr(lr).betas(beta1, beta2).eps(eps).weight_decay(decay).amsgrad(amsgrad);
        let mut opt = opt.build().unwrap();
        let mut expected: Vec<_> = params(4).iter().map(Tensor::detach).collect();
        let mut moments: Vec<_> =
            expected.iter().map(|p| (p.zeros_like(), p.zeros_like(), p.zeros_like(), 0)).collect();
        for step in 0..6 {
            set_grads(&ours, step);
            for ((param, grad), (m, v, v_max, t)) in
                expected.iter_mut().zip(ours.iter().map(Tensor::grad)).zip(&mut moments)
            {
                if !grad.defined() {
                    continue;
                }
                *t += 1;
                *m = &*m * beta1 + &grad * (1.0 - beta1);
                *v = &*v * beta2 + grad.square() * (1.0 - beta2);
                *v_max = v_max.maximum(v);
                let second = if amsgrad { &*v_max } else { &*v };
                let denominator = second.sqrt() / (1.0 - beta2.powi(*t)).sqrt() + eps;
                *param = &*param * (1.0 - lr * decay) - &*m * (lr / (1.0 - beta1.powi(*t))) / denominator;
            }
            opt.step().unwrap();
            opt.zero_grad().unwrap();
            for (index, (ours, expected)) in ours.iter().zip(&expected).enumerate() {
                assert_close(ours, expected, &format!("amsgrad {amsgrad}, step {step}, parameter {index}"));
            }
        }
    }
}

#[test]
fn sgd_starts_each_momentum_at_its_own_first_gradient() {
    let (lr, momentum, dampening, decay) = (0.1, 0.9, 0.3, 0.01);
    let ours = params(4);
    let mut opt = Sgd::builder(&ours);
    opt = opt.lr(lr).momentum(momentum).dampening(dampening).weight_decay(decay);
    let mut opt = opt.build().unwrap();
    let mut expected: Vec<_> = params(4).iter().map(Tensor::detach).collect();
    let mut buffers: Vec<Option<Tensor>> = expected.iter().map(|_| None).collect();
    for step in 1..7 {
        set_grads(&ours, step);
        for ((param, grad), buffer) in expected.iter_mut().zip(ours.iter().map(Tensor::grad)).zip(&mut buffers) {
            if !grad.defined() {
                continue;
            }
            let grad = grad + &*param * decay;
            let next = match buffer.take() {
                Some(buffer) => buffer * momentum + grad * (1.0 - dampening),
                None => grad.copy(),
            };
            *param = &*param - &next * lr;
            *buffer = Some(next);
        }
        opt.step().unwrap();
        opt.zero_grad().unwrap();
        for (index, (ours, expected)) in ours.iter().zip(&expected).enumerate() {
            assert_close(ours, expected, &format!("step {step}, parameter {index}"));
        }
    }
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

/// PyTorch 2.11 goes on from uninitialised momentum here.
#[test]
fn momentum_after_a_skipped_first_step_is_that_of_the_first_good_one() {
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

/// The kernels walk over parameter and gradient by one index, so both have to lie in memory alike.
#[test]
fn gradients_of_another_layout_are_stepped_with_rightly() {
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
    let mut opt = Sgd::builder(first).lr(0.5).then_group(vec![slow.shallow_clone()]).lr(0.25).build().unwrap();
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

#[test]
fn options_and_parameters_are_checked() {
    let param = || Tensor::ones([2], DOUBLE).set_requires_grad(true);
    let option = |result: Result<AdamW, OptimizerError>| match result {
        Err(OptimizerError::InvalidOption { option, .. }) => option,
        other => panic!("{other:?}"),
    };
    assert_eq!(option(AdamW::builder(vec![param()]).lr(-1.0).build()), "lr");
    assert_eq!(option(AdamW::builder(vec![param()]).betas(1.0, 0.9).build()), "beta1");
    assert_eq!(option(AdamW::builder(vec![param()]).betas(0.9, f64::NAN).build()), "beta2");
    assert_eq!(option(AdamW::builder(vec![param()]).eps(-1e-8).build()), "eps");
    assert!(Sgd::builder(vec![param()]).nesterov(true).build().is_err());
    assert!(Sgd::builder(vec![param()]).nesterov(true).momentum(0.9).dampening(0.1).build().is_err());
    assert!(Sgd::builder(vec![]).build().is_ok());

    let refused = |params: Vec<Tensor>| Sgd::builder(params).build().unwrap_err().to_string();
    assert!(
        refused(vec![param(), Tensor::ones([2], (Kind::Int64, CPU))]).starts_with("parameter 1: its dtype is Int64")
    );
    assert!(refused(vec![param() * 2.0]).contains("not a leaf"));
    assert!(refused(vec![Tensor::new()]).contains("undefined"));
    let base = Tensor::ones([4, 2], DOUBLE);
    assert!(refused(vec![base.select(1, 0).set_requires_grad(true)]).contains("does not fill its memory"));
    assert!(refused(vec![param().detach().select(0, 0).expand([8], false)]).contains("does not fill its memory"));
    let sparse = base.to_sparse_sparse_dim(2).set_requires_grad(true);
    assert!(refused(vec![sparse]).contains("sparse"));
    let transposed = base.transpose(0, 1).set_requires_grad(true);
    assert!(Sgd::builder(vec![transposed, Tensor::zeros([0, 3], DOUBLE)]).build().is_ok());
    let twice = param();
    assert!(refused(vec![twice.shallow_clone(), twice.shallow_clone()]).contains("given twice"));
    let across = Sgd::builder(vec![twice.shallow_clone()]).then_group(vec![twice.shallow_clone()]).build();
    assert!(across.unwrap_err().to_string().contains("given twice"));
}

#[test]
fn clipping_scales_all_gradients_to_the_norm_or_leaves_them() {
    let ours = params(3);
    set_grads(&ours, 1); // the third gets none
    let before: Vec<_> = ours[..2].iter().map(|param| param.grad().copy()).collect();
    let squares: f64 = before.iter().map(|grad| grad.square().sum(Kind::Double).double_value(&[])).sum();
    let norm = clip_grad_norm_(&ours, 1e9).unwrap();
    assert!((norm.double_value(&[]) - squares.sqrt()).abs() < 1e-12 * squares.sqrt());
    assert!(ours[0].grad().equal(&before[0]), "small enough already");
    clip_grad_norm_(&ours, 0.5).unwrap();
    let factor = 0.5 / (squares.sqrt() + 1e-6);
    for (param, before) in ours.iter().zip(&before) {
        assert_close(&param.grad(), &(before * factor), "clipped");
    }
    assert!(clip_grad_norm_(&ours, f64::NAN).is_err());
    assert_eq!(clip_grad_norm_(params(2), 1.0).unwrap().double_value(&[]), 0.0, "no gradients");
}
