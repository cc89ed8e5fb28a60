//! L-BFGS: closures that fail, losses that are not finite, and states.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use overdrive_core::{Entry, Optimizer, OptimizerError, Stateful};
use overdrive_optim::{Lbfgs, LbfgsBuilder, LineSearch, Lookahead};
use tch::{Kind, Tensor};

use crate::state::{assert_same, copied};
use crate::{CPU, DOUBLE};

fn start() -> Vec<Tensor> {
    let make = |numbers: &[f64]| Tensor::from_slice(numbers).set_requires_grad(true);
    vec![make(&[-1.2, 1.0]), make(&[0.5, 2.0, -0.3])]
}

/// A narrow curved valley.
fn valley(params: &[Tensor]) -> Tensor {
    let x = Tensor::cat(params, 0);
    let (head, tail) = (x.slice(0, 0, -1, 1), x.slice(0, 1, None, 1));
    let bowl: Tensor = 1.0 - &head;
    ((tail - head.square()).square() * 100.0 + bowl.square()).sum(Kind::Double)
}

fn step(opt: &mut Lbfgs, params: &[Tensor]) -> f64 {
    opt.step_with(|| {
        let loss = valley(params);
        loss.backward();
        Ok::<_, OptimizerError>(loss)
    })
    .unwrap()
}

fn wolfe(params: &[Tensor]) -> LbfgsBuilder {
    Lbfgs::builder(params).line_search_fn(LineSearch::StrongWolfe)
}

#[test]
fn the_strong_wolfe_search_finds_the_end_of_a_curved_valley() {
    let params = &start()[..1];
    // The default tolerance ends at a loss of 4e-10, as in PyTorch.
    let mut opt = wolfe(params).tolerance_change(1e-20).build().unwrap();
    for _ in 0..10 {
        step(&mut opt, params);
    }
    assert!(step(&mut opt, params) < 1e-15);
    assert!(params[0].allclose(&params[0].ones_like(), 0.0, 1e-6, false), "{}", params[0]);
}

#[derive(Debug, thiserror::Error)]
enum Failed {
    #[error("no data")]
    NoData,
    #[error(transparent)]
    Optimizer(#[from] OptimizerError),
}

#[test]
fn a_closure_that_fails_or_panics_leaves_everything_as_it_was() {
    for line_search in [LineSearch::None, LineSearch::StrongWolfe] {
        let params = start();
        let mut opt = Lbfgs::builder(&params).lr(1e-3).line_search_fn(line_search).build().unwrap();
        step(&mut opt, &params);
        let (before, state): (Vec<_>, _) =
            (params.iter().map(|it| it.detach().copy()).collect(), copied(&opt.state_dict().unwrap()));
        for fails_at in [0, 1, 3] {
            for panics in [false, true] {
                let calls = Cell::new(0);
                let closure = || {
                    if calls.replace(calls.get() + 1) == fails_at {
                        assert!(!panics, "planted");
                        return Err(Failed::NoData);
                    }
                    let loss = valley(&params);
                    loss.backward();
                    Ok(loss)
                };
                match catch_unwind(AssertUnwindSafe(|| opt.step_with(closure))) {
                    Ok(result) => assert!(matches!(result, Err(Failed::NoData)) && !panics),
                    Err(_) => assert!(panics),
                }
                let is_same = params.iter().zip(&before).all(|(now, before)| now.equal(before));
                assert!(is_same, "{line_search:?}, call {fails_at}");
                assert_same(&opt.state_dict().unwrap(), &state, "after a failure");
            }
        }
    }
}

#[test]
fn losses_that_are_not_finite_neither_hang_nor_spoil_the_parameters() {
    for bad in [f64::NAN, f64::INFINITY] {
        // Finite only near the start: the search has to come back.
        let params = vec![(Tensor::ones([1], DOUBLE) * 0.5).set_requires_grad(true)];
        let mut opt = wolfe(&params).lr(100.0).build().unwrap();
        let evaluated = Cell::new(0);
        let mut steep = || {
            evaluated.set(evaluated.get() + 1);
            let x = &params[0];
            let loss = x.square().sum(Kind::Double);
            let loss = if x.double_value(&[0]).abs() > 0.9 { loss * bad } else { loss };
            loss.backward();
            Ok::<_, OptimizerError>(loss)
        };
        opt.step_with(&mut steep).unwrap();
        assert!(params[0].double_value(&[0]).abs() < 0.5, "{}", params[0]);
        assert!(evaluated.get() <= 26, "{} evaluations", evaluated.get());

        // Nowhere finite.
        for line_search in [LineSearch::None, LineSearch::StrongWolfe] {
            let params = start();
            let mut opt = Lbfgs::builder(&params).line_search_fn(line_search).build().unwrap();
            let loss = opt.step_with(|| {
                let loss = valley(&params) * bad;
                loss.backward();
                Ok::<_, OptimizerError>(loss)
            });
            assert!(!loss.unwrap().is_finite());
            assert!(params.iter().zip(start()).all(|(param, start)| param.equal(&start)));
        }
    }
}

#[test]
fn it_resumes_bit_for_bit_also_with_names() {
    for named in [false, true] {
        for saved_after in [0, 1, 4] {
            let build = |params: &[Tensor]| {
                let names = ["a", "b"].into_iter().zip(params);
                let builder = if named { Lbfgs::builder(names.collect::<Vec<_>>()) } else { Lbfgs::builder(params) };
                let builder = builder.max_iter(3).history_size(4).line_search_fn(LineSearch::StrongWolfe);
                builder.build().unwrap()
            };
            let first = start();
            let mut unbroken = build(&first);
            for _ in 0..saved_after {
                step(&mut unbroken, &first);
            }
            let state = copied(&unbroken.state_dict().unwrap());
            let second: Vec<_> = first.iter().map(|it| it.detach().copy().set_requires_grad(true)).collect();
            let mut resumed = build(&second);
            // Load into an optimizer that has trained before.
            step(&mut resumed, &second);
            tch::no_grad(|| second.iter().zip(&first).for_each(|(it, first)| it.shallow_clone().copy_(first)));
            resumed.load_state_dict(&state).unwrap();
            assert_same(&resumed.state_dict().unwrap(), &state, "loaded");
            for _ in 0..4 {
                assert_eq!(step(&mut unbroken, &first), step(&mut resumed, &second));
            }
            assert!(first.iter().zip(&second).all(|(one, other)| one.equal(other)));
            assert_same(&unbroken.state_dict().unwrap(), &resumed.state_dict().unwrap(), "after more steps");
        }
    }
}

#[test]
fn states_that_do_not_fit_are_refused_and_change_nothing() {
    let params = start();
    let mut opt = wolfe(&params).build().unwrap();
    step(&mut opt, &params);
    let state = opt.state_dict().unwrap().copied().unwrap();
    assert!(state.get("state.0.old_dirs.0").is_ok() && state.get("state.0.H_diag").is_ok(), "{state:?}");
    let long = Entry::Tensor(Tensor::zeros([6], DOUBLE));
    let bad = [
        ("state.0.d", long),
        ("state.0.n_iter", Entry::Int(-1)),
        ("state.0.old_dirs.99", Entry::Int(0)),
        ("state.1.d", Entry::Int(0)),
        ("param_groups.0.history_size", Entry::Int(0)),
        ("param_groups.0.line_search_fn", Entry::Text("armijo".to_owned())),
        ("param_groups.0.params", Entry::Int(1)),
        ("param_groups.0.momentum", Entry::Float(0.9)),
    ];
    for (key, entry) in bad {
        let mut broken = copied(&state);
        broken.insert(key, entry);
        let said = opt.load_state_dict(&broken).unwrap_err().to_string();
        assert!(said.contains(key), "{key}: {said}");
        assert_same(&opt.state_dict().unwrap(), &state, key);
    }
    opt.load_state_dict(&state).unwrap();
}

#[test]
fn options_parameters_and_closures_are_checked() {
    let params = start();
    let option = |builder: LbfgsBuilder| match builder.build() {
        Err(OptimizerError::InvalidOption { option, .. }) => option,
        other => panic!("{other:?}"),
    };
    assert_eq!(option(Lbfgs::builder(&params).lr(-1.0)), "lr");
    assert_eq!(option(Lbfgs::builder(&params).max_iter(0)), "max_iter");
    assert_eq!(option(Lbfgs::builder(&params).max_eval(0)), "max_eval");
    assert_eq!(option(Lbfgs::builder(&params).history_size(0)), "history_size");
    assert_eq!(option(Lbfgs::builder(&params).tolerance_grad(f64::NAN)), "tolerance_grad");
    assert_eq!(option(Lbfgs::builder(&params).tolerance_change(-1.0)), "tolerance_change");
    assert!(matches!(Lbfgs::builder(Vec::<Tensor>::new()).build(), Err(OptimizerError::NoParameters)));
    let single = Tensor::ones([2], (Kind::Float, CPU)).set_requires_grad(true);
    let mixed = Lbfgs::builder([&params[0], &single]).build().unwrap_err().to_string();
    assert!(mixed.starts_with("parameter number 1: it is Float on Cpu"), "{mixed}");
    let twice = Lbfgs::builder([&params[0], &params[0]]).build().unwrap_err().to_string();
    assert!(twice.contains("given twice"), "{twice}");

    let mut opt = wolfe(&params).build().unwrap();
    assert_eq!((opt.num_groups(), opt.lr(0), opt.lr(1)), (1, Some(1.0), None));
    opt.set_lr(0, 0.5).unwrap();
    assert_eq!(opt.lr(0), Some(0.5));
    assert!(matches!(opt.set_lr(1, 0.5), Err(OptimizerError::NoSuchGroup { group: 1, groups: 1 })));
    assert!(matches!(opt.step(), Err(OptimizerError::NeedsClosure)));
    let forgot = opt.step_with(|| Ok::<_, OptimizerError>(valley(&params))).unwrap_err().to_string();
    assert!(forgot.contains("call `backward`"), "{forgot}");
    let mut around = Lookahead::new(opt, 2, 0.5).unwrap();
    assert!(matches!(around.step(), Err(OptimizerError::NeedsClosure)));
}
