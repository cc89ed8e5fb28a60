//! Results that are kept.

use std::sync::Arc;

use overdrive_ffi::autograd::{GradOptions, grad};
use overdrive_memory::{ActivationCheckpoint, Policy, checkpoint};
use tch::{Kind, Tensor};

use crate::{alone, grads, leaf};

/// Keeps the results of one operator.
fn only(operator: &'static str) -> Policy {
    Policy::Operators(Arc::new(move |name, _| name == operator))
}

#[test]
fn a_product_that_is_kept_is_not_computed_again() {
    let _alone = alone();
    let (x, weight) = (leaf(&[4, 4]), leaf(&[4, 4]));
    let product = tch::no_grad(|| x.mm(&weight));
    let run = || {
        let own = weight.shallow_clone();
        move |[x]: &[Tensor; 1]| x.f_mm(&own)?.f_sin()?.f_exp()
    };
    let keeping = ActivationCheckpoint::default().keep(Policy::Products).run(run(), [&x]).unwrap();
    let plain = checkpoint(run(), [&x]).unwrap();
    // Behind the back of the check, so that both can be told apart: what is computed again has the new weight.
    let _ = tch::no_grad(|| weight.data().fill_(0.5));
    let gradient = |product: Tensor| tch::no_grad(|| (product.sin().exp() * product.cos()).mm(&weight.tr()));
    assert_eq!(grads(&keeping.sum(Kind::Float), &[&x])[0], gradient(product.shallow_clone()));
    assert_eq!(grads(&plain.sum(Kind::Float), &[&x])[0], gradient(tch::no_grad(|| x.mm(&weight))));
}

#[test]
fn a_kept_draw_leaves_the_generator_as_it_did() {
    let _alone = alone();
    let x = leaf(&[4, 4]);
    let run = |x: &Tensor| {
        let (one, two) = (x.f_randn_like()?, x.f_rand_like()?);
        x.f_mul(&one)?.f_mul(&two)?.f_exp()
    };
    let of = |y: Tensor| grads(&y.sum(Kind::Float), &[&x]);
    tch::manual_seed(5);
    let expected = of(run(&x).unwrap());
    tch::manual_seed(5);
    let options = ActivationCheckpoint::default().keep(only("aten::randn_like"));
    assert_eq!(of(options.run(move |[x]| run(x), [&x]).unwrap()), expected);
}

/// The result that is kept would be another one.
#[test]
fn a_product_that_is_changed_in_place_is_computed_again() {
    let _alone = alone();
    let (x, weight) = (leaf(&[4, 4]), leaf(&[4, 4]));
    let run = |x: &Tensor, weight: &Tensor| x.f_mm(weight)?.f_relu_()?.f_sin();
    let own = weight.shallow_clone();
    let y = ActivationCheckpoint::default().keep(Policy::Products).run(move |[x]| run(x, &own), [&x]).unwrap();
    let expected = grads(&run(&x, &weight).unwrap().sum(Kind::Float), &[&x, &weight]);
    assert_eq!(grads(&y.sum(Kind::Float), &[&x, &weight]), expected);
}

#[test]
fn kept_results_work_with_nesting_and_second_derivatives() {
    let _alone = alone();
    let (x, weight) = (leaf(&[4, 4]), leaf(&[4, 4]));
    let create = GradOptions { create_graph: true, retain_graph: true, ..GradOptions::default() };
    let own = weight.shallow_clone();
    let outer = move |[x]: &[Tensor; 1]| {
        let y = x.f_mm(&own)?.f_sin()?;
        let own = own.shallow_clone();
        let inner = move |[y]: &[Tensor; 1]| y.f_mm(&own)?.f_sin();
        ActivationCheckpoint::default().keep(Policy::Products).run(inner, [&y]).map(|z| z.exp())
    };
    let y = ActivationCheckpoint::default().keep(Policy::Products).run(outer, [&x]).unwrap();
    let second = |y: Tensor| {
        let first = grad::<Tensor>(&[&y.sum(Kind::Float)], &[&x], &[], create).unwrap();
        grads(&first[0].square().sum(Kind::Float), &[&x, &weight])
    };
    assert_eq!(second(y), second(x.mm(&weight).sin().mm(&weight).sin().exp()));
}
