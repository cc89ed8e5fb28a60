//! Gradients clipped by norm and by value.

use overdrive_core::OptimizerError;
use overdrive_optim::{ClipGradNorm, clip_grad_norm_, clip_grad_value_};
use tch::{Kind, Tensor};

use crate::{assert_close, params, set_grads};

#[test]
fn clipping_scales_all_gradients_or_leaves_them_unchanged() {
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

#[test]
fn norms_of_other_orders_and_norms_that_are_not_finite() {
    let ours = params(2);
    set_grads(&ours, 1);
    let largest = ours.iter().map(|param| param.grad().abs().max().double_value(&[])).fold(0.0, f64::max);
    let absolute: f64 = ours.iter().map(|param| param.grad().abs().sum(Kind::Double).double_value(&[])).sum();
    let strict = |bound| ClipGradNorm::new(bound).error_if_nonfinite(true);
    let norm = strict(1e9).norm_type(1.0).clip_(&ours).unwrap();
    assert!((norm.double_value(&[]) - absolute).abs() < 1e-12 * absolute);
    let norm = strict(largest / 2.0).norm_type(f64::INFINITY).clip_(&ours).unwrap();
    assert_eq!(norm.double_value(&[]), largest);
    let clipped = ours.iter().map(|param| param.grad().abs().max().double_value(&[])).fold(0.0, f64::max);
    assert!((clipped - largest / 2.0).abs() < 1e-5 * largest);

    let before: Vec<_> = ours.iter().map(|param| param.grad().copy()).collect();
    for bad in [f64::NAN, f64::INFINITY] {
        let _ = ours[1].grad().get(0).fill_(bad);
        let error = strict(1.0).clip_(&ours).unwrap_err();
        assert!(
            matches!(error, OptimizerError::NonFiniteNorm { norm_type: 2.0, found } if !found.is_finite()),
            "{error}"
        );
        assert!(ours[0].grad().equal(&before[0]), "an error changes nothing");
    }
    assert!(!clip_grad_norm_(&ours, 1.0).unwrap().double_value(&[]).is_finite(), "without the option, no error");
    for bad in [f64::NAN, 0.0, -1.0] {
        let error = ClipGradNorm::new(1.0).norm_type(bad).clip_(&ours).unwrap_err();
        assert!(matches!(error, OptimizerError::InvalidOption { option: "norm_type", .. }), "{error}");
    }
}

#[test]
fn values_are_clipped_on_both_sides() {
    let ours = params(3);
    set_grads(&ours, 1); // the third gets none
    let before: Vec<_> = ours[..2].iter().map(|param| param.grad().copy()).collect();
    clip_grad_value_(&ours, 0.25).unwrap();
    for (param, before) in ours.iter().zip(&before) {
        assert!(param.grad().equal(&before.clamp(-0.25, 0.25)));
    }
    assert!(matches!(clip_grad_value_(&ours, -1.0), Err(OptimizerError::InvalidOption { option: "clip_value", .. })));
}

#[test]
fn gradients_that_cannot_be_clipped_are_named() {
    let dense = params(2);
    set_grads(&dense, 0);
    let before = dense[0].grad().copy();
    let all = [dense[0].shallow_clone(), dense[1].shallow_clone(), crate::with_sparse_gradient()];
    for error in [clip_grad_norm_(&all, 1e-3).map(drop), clip_grad_value_(&all, 1e-3)] {
        let error = error.unwrap_err().to_string();
        assert!(error.starts_with("parameter number 2: its gradient is sparse"), "{error}");
    }
    let error = clip_grad_value_([Tensor::new()], 1.0).unwrap_err().to_string();
    assert_eq!(error, "parameter number 0: it is undefined");
    assert!(dense[0].grad().equal(&before));
}
