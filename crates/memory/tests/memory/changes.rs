//! Functions that compute something else when they run again.

use std::sync::Arc;

use overdrive_ffi::autocast::{Region, State};
use overdrive_memory::{ActivationCheckpoint, DeterminismCheck, Policy, checkpoint};
use tch::{Device, Kind, TchError, Tensor};

use crate::{Calls, FLOAT, alone, grads, leaf};

/// The error of a backward pass over what a function returns, which is told how often it was called.
fn error_of(function: impl Fn(&Tensor, usize) -> Result<Tensor, TchError> + Send + 'static) -> String {
    let (x, calls) = (leaf(&[4, 4]), Calls::default());
    let run = move |[x]: &[Tensor; 1]| {
        calls.count();
        function(x, calls.get())
    };
    let y = ActivationCheckpoint::default().name("block 3").run(run, [&x]).unwrap();
    y.sum(Kind::Float).f_backward().unwrap_err().to_string()
}

#[test]
fn a_function_that_changes_is_an_error_that_names_it() {
    let _alone = alone();
    let other_shape = error_of(|x, call| x.f_narrow(0, 0, 5 - call as i64)?.f_sin());
    assert!(other_shape.contains("block 3: saved tensor 0 was Float [4, 4]"), "{other_shape}");
    let other_kind = error_of(|x, call| x.f_to_kind(if call == 1 { Kind::Float } else { Kind::Double })?.f_sin());
    assert!(other_kind.contains("and then Double [4, 4]"), "{other_kind}");
    let fewer = error_of(|x, call| if call == 1 { x.f_sin()?.f_sin() } else { x.f_sin() });
    assert!(fewer.contains("block 3: it saved 2 tensors, and then 1"), "{fewer}");
    let failing = error_of(|x, call| if call == 1 { x.f_sin() } else { x.f_view([7]) });
    assert!(failing.contains("block 3: ") && failing.contains("shape '[7]' is invalid"), "{failing}");
    let panicking = error_of(|x, call| if call == 1 { x.f_sin() } else { panic!("out of ideas") });
    assert!(panicking.contains("block 3: out of ideas"), "{panicking}");
}

#[test]
fn more_tensors_than_before_are_an_error_without_an_early_stop() {
    let _alone = alone();
    let (x, calls) = (leaf(&[4]), Calls::default());
    let run = move |[x]: &[Tensor; 1]| {
        calls.count();
        if calls.get() == 1 { x.f_sin() } else { x.f_sin()?.f_sin() }
    };
    let y = ActivationCheckpoint::default().early_stop(false).run(run, [&x]).unwrap();
    let error = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(error.contains("it saved 1 tensors, and then more") && error.contains("changes.rs"), "{error}");
}

/// As without a checkpoint, where libtorch finds it.
#[test]
fn tensors_that_were_changed_in_place_are_errors() {
    let _alone = alone();
    let (x, weight) = (leaf(&[4, 4]), leaf(&[4, 4]));
    let own = weight.shallow_clone();
    let loss = checkpoint(move |[x]| x.f_matmul(&own)?.f_sin(), [&x]).unwrap().sum(Kind::Float);
    let _ = tch::no_grad(|| weight.shallow_clone().f_add_(&Tensor::from(1f32)));
    let error = loss.f_backward().unwrap_err().to_string();
    assert!(error.contains("changed in place"), "{error}");

    let mut input = x.sin();
    let y = checkpoint(|[x]| x.f_sin()?.f_sin(), [&input]).unwrap();
    let _ = input.f_mul_(&Tensor::from(2f32));
    let error = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(error.contains("modified by an inplace operation"), "{error}");

    // A count that a function keeps in a tensor is another one when it runs again.
    let count = Tensor::zeros([], FLOAT);
    let own = count.shallow_clone();
    let run = move |[x]: &[Tensor; 1]| x.f_mul(&own.shallow_clone().f_add_(&Tensor::ones([], FLOAT))?);
    let y = checkpoint(run, [&x]).unwrap();
    let error = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(error.contains("2 times changed in place"), "{error}");
}

/// No operator saves these values.
#[test]
fn leaves_that_were_changed_in_place_are_errors() {
    let _alone = alone();
    let (x, weight, bias) = (leaf(&[2, 4]), leaf(&[4, 4]), leaf(&[4]));
    let tokens = Tensor::from_slice(&[1i64, 3]);
    let on = State { enabled: true, kind: Kind::BFloat16, cache_enabled: true };
    type Run = fn(&Tensor, &[Tensor; 3]) -> Result<Tensor, TchError>;
    let runs: [(&Tensor, bool, Run); 3] = [
        (&bias, false, |x, [_, bias, _]| x.f_add(bias)?.f_sin()?.f_sin()),
        (&weight, false, |x, [weight, _, tokens]| {
            Tensor::f_embedding(weight, tokens, -1, false, false)?.f_add(x)?.f_sin()
        }),
        (&weight, true, |x, [weight, ..]| x.f_matmul(weight)?.f_sin()?.f_sin()),
    ];
    for (number, (changed, cast, run)) in runs.into_iter().enumerate() {
        for is_changed in [false, true] {
            let own = [&weight, &bias, &tokens].map(Tensor::shallow_clone);
            let y = {
                let _region = cast.then(|| Region::enter(Device::Cpu, on).unwrap());
                checkpoint(move |[x]| run(x, &own), [&x]).unwrap()
            };
            if is_changed {
                let _ = tch::no_grad(|| changed.shallow_clone().f_add_(&Tensor::from(1f32)));
            }
            let result = y.sum(Kind::Float).f_backward();
            assert_eq!(result.is_err(), is_changed, "{number}");
            let text = result.err().map(|error| error.to_string()).unwrap_or_default();
            assert_eq!(text.contains("leaf of shape"), is_changed, "{number}: {text}");
        }
    }
}

/// While it runs, a frame holds its graph, which holds the frame.
#[test]
fn a_function_that_panics_or_fails_is_dropped() {
    let _alone = alone();
    let (x, held) = (leaf(&[4]), Arc::new(()));
    for panics in [false, true] {
        let own = Arc::clone(&held);
        let run = move |[x]: &[Tensor; 1]| {
            let _ = &own;
            let y = x.f_sin()?.f_sin()?;
            assert!(!panics, "no more");
            y.f_view([7])
        };
        let result = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| checkpoint(run, [&x]).is_err()));
        assert!(result.unwrap_or(true));
        assert_eq!(Arc::strong_count(&held), 1, "panics: {panics}");
    }
}

#[test]
fn the_check_can_be_left_out() {
    let _alone = alone();
    let (x, calls) = (leaf(&[4, 4]), Calls::default());
    let run = move |[x]: &[Tensor; 1]| {
        calls.count();
        Ok::<_, TchError>((x * if calls.get() == 1 { 2.0 } else { 3.0 }).sin())
    };
    let y = ActivationCheckpoint::default().determinism_check(DeterminismCheck::None).run(run, [&x]).unwrap();
    assert_eq!(grads(&y.sum(Kind::Float), &[&x])[0], (&x * 3.0).cos() * 2.0);
}

/// Shapes are the same, values are not: a scale that another generator draws, and a captured tensor with a history.
#[test]
fn other_values_are_errors_where_they_are_compared() {
    let _alone = alone();
    let checked = || ActivationCheckpoint::default().determinism_check(DeterminismCheck::Values);
    let (x, w, calls) = (leaf(&[4, 4]), leaf(&[4, 4]), Calls::default());
    let run = move |[x]: &[Tensor; 1]| {
        calls.count();
        Ok::<_, TchError>((x * if calls.get() == 1 { 2.0 } else { 3.0 }).sin())
    };
    let y = checked().run(run, [&x]).unwrap();
    let error = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(error.contains("with other values") && error.contains("changes.rs"), "{error}");

    let captured = &w * 2.0;
    let own = captured.shallow_clone();
    let y = checked().run(move |[x]| x.f_add(&own)?.f_sin(), [&x]).unwrap();
    let _ = captured.shallow_clone().f_add_(&Tensor::ones([], FLOAT));
    let error = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(error.contains("with other values"), "{error}");

    // What is the same passes, whatever its memory format, with a product kept too.
    let run = |[x]: &[Tensor; 1]| x.f_matmul(&x.f_tr()?)?.f_tr()?.f_sin();
    let expected = grads(&run(&[x.shallow_clone()]).unwrap().sum(Kind::Float), &[&x]);
    for options in [checked(), checked().keep(Policy::Products)] {
        let y = options.run(run, [&x]).unwrap();
        assert_eq!(grads(&y.sum(Kind::Float), &[&x]), expected);
    }
}

/// Of the second run: here an input that is no longer there.
#[test]
fn errors_before_the_second_run_name_the_scope() {
    let _alone = alone();
    let mut input = leaf(&[4, 4]).sin();
    let y = ActivationCheckpoint::default().name("layer 7").run(|[x]| x.f_sin()?.f_sin(), [&input]).unwrap();
    let _ = input.f_mul_(&Tensor::from(2f32));
    let error = y.sum(Kind::Float).f_backward().unwrap_err().to_string();
    assert!(error.contains("layer 7") && error.contains("modified by an inplace operation"), "{error}");
}
