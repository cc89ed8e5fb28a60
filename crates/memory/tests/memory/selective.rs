//! Results that are kept.

use std::sync::Arc;

use overdrive_ffi::autocast::{Region, State};
use overdrive_ffi::autograd::{GradOptions, grad};
use overdrive_ffi::host_memory;
use overdrive_memory::{ActivationCheckpoint, Budget, Policy, checkpoint};
use tch::{Device, Kind, TchError, Tensor};

use crate::{FLOAT, alone, grads, leaf};

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

/// The last one of a function, of which no operator saves the result.
#[test]
fn a_product_that_the_backward_pass_does_not_need_is_not_kept() {
    const SIDE: i64 = 64;
    let _alone = alone();
    host_memory::count(usize::MAX).unwrap();
    let (x, weight) = (leaf(&[SIDE, SIDE]), leaf(&[SIDE, SIDE]));
    let kept = |is_needed: bool| {
        let before = host_memory::stats().unwrap().allocated;
        let own = weight.shallow_clone();
        let run = move |[x]: &[Tensor; 1]| {
            let product = x.f_sin()?.f_mm(&own)?;
            if is_needed { product.f_exp()?.f_sin() } else { Ok(product) }
        };
        let result = ActivationCheckpoint::default().keep(Policy::Products).run(run, [&x]).unwrap();
        let loss = result.sum(Kind::Float);
        drop(result);
        let kept = host_memory::stats().unwrap().allocated - before;
        drop(grads(&loss, &[&x]));
        kept
    };
    kept(true);
    assert_eq!(kept(true) - kept(false), 4 * (SIDE * SIDE) as u64);
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

fn anything() -> Policy {
    Policy::Operators(Arc::new(|_, _| true))
}

/// Gradients of a function under a policy, and without a checkpoint, by the same random numbers.
fn both(policy: Policy, x: &Tensor, run: fn(&Tensor) -> Result<Tensor, TchError>) -> [Vec<Tensor>; 2] {
    tch::manual_seed(5);
    let expected = grads(&run(x).unwrap().sum(Kind::Float), &[x]);
    tch::manual_seed(5);
    let y = ActivationCheckpoint::default().keep(policy).run(move |[x]| run(x), [x]).unwrap();
    [grads(&y.sum(Kind::Float), &[x]), expected]
}

/// Such an operator has no argument that tells the generator.
#[test]
fn a_kept_draw_without_a_tensor_leaves_the_generator_as_it_did() {
    let _alone = alone();
    let [found, expected] = both(only("aten::rand"), &leaf(&[4, 4]), |x| {
        let one = Tensor::f_rand([4, 4], FLOAT)?;
        x.f_mul(&one)?.f_mul(&x.f_rand_like()?)?.f_exp()
    });
    assert_eq!(found, expected);
}

#[test]
fn operators_that_return_lists_run_again() {
    let _alone = alone();
    let [found, expected] = both(anything(), &leaf(&[4, 4]), |x| {
        let parts = x.f_sin()?.f_unsafe_chunk(2, 0)?;
        parts[0].f_mul(&parts[1])?.f_exp()
    });
    assert_eq!(found, expected);
}

#[test]
fn an_operator_that_did_not_run_before_is_an_error() {
    let _alone = alone();
    let (x, calls) = (leaf(&[4, 4]), crate::Calls::default());
    let run = move |[x]: &[Tensor; 1]| {
        calls.count();
        if calls.get() > 1 {
            drop(x.f_detach()?.f_cos()?);
        }
        x.f_sin()?.f_tan()?.f_exp()
    };
    let options = ActivationCheckpoint::default().keep(anything());
    let error = options.run(run, [&x]).unwrap().sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(error.contains("aten::cos runs more often than the first time"), "{error}");
}

/// Within autocast's region its cache has the weight's cast, which the second run makes anew.
#[test]
fn a_cast_that_only_the_second_run_makes_shifts_nothing() {
    let _alone = alone();
    let (x, weight) = (leaf(&[8, 8]), leaf(&[8, 8]));
    let layer = |x: &Tensor, weight: &Tensor| x.f_matmul(weight)?.f_sin()?.f_matmul(weight)?.f_exp();
    let gradients = |policy: Option<Policy>| {
        let _region =
            Region::enter(Device::Cpu, State { enabled: true, kind: Kind::BFloat16, cache_enabled: true }).unwrap();
        // Fills the cache.
        drop(x.matmul(&weight));
        let own = weight.shallow_clone();
        let y = match policy {
            None => layer(&x, &weight).unwrap(),
            Some(policy) => ActivationCheckpoint::default().keep(policy).run(move |[x]| layer(x, &own), [&x]).unwrap(),
        };
        grads(&y.to_kind(Kind::Float).sum(Kind::Float), &[&x, &weight])
    };
    let expected = gradients(None);
    assert_eq!(gradients(Some(anything())), expected);
    let budget = Policy::Budget(Budget::new(0.7).unwrap());
    for _ in 0..4 {
        assert_eq!(gradients(Some(budget.clone())), expected);
    }
}

#[test]
fn a_result_that_was_changed_in_place_after_the_function_is_computed_again() {
    let _alone = alone();
    let (x, weight) = (leaf(&[4, 4]), leaf(&[4, 4]));
    let run = |x: &Tensor, weight: &Tensor| {
        let product = x.f_mm(weight)?;
        Ok::<_, TchError>((product.f_exp()?, product))
    };
    let expected = grads(&run(&x, &weight).unwrap().0.sum(Kind::Float), &[&x, &weight]);
    let own = weight.shallow_clone();
    let options = ActivationCheckpoint::default().keep(Policy::Products);
    let (y, mut product) = options.run(move |[x]| run(x, &own), [&x]).unwrap();
    let _ = product.f_relu_().unwrap();
    assert_eq!(grads(&y.sum(Kind::Float), &[&x, &weight]), expected);
}
