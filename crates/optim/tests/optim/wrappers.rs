//! Lookahead, SAM and joint optimizers around an SGD whose steps are known.

use overdrive_core::{Entry, Optimizer, OptimizerError, StateDict, StateError, Stateful};
use overdrive_optim::{
    AdamW, AveragedModel, Averaging, Joint, Lbfgs, Lookahead, LowPrecision, Muon, Sam, Sgd, SgdScheduleFree,
    hidden_matrices,
};
use tch::{Kind, Tensor, nn};

use crate::{CPU, DOUBLE};

fn weight() -> Tensor {
    (Tensor::ones([1], DOUBLE) * 8.0).set_requires_grad(true)
}

fn value(weight: &Tensor) -> f64 {
    weight.double_value(&[0])
}

/// A step with a gradient of 1.
fn descend(opt: &mut dyn Optimizer, weight: &Tensor) {
    weight.sum(Kind::Double).backward();
    opt.step().unwrap();
    opt.zero_grad().unwrap();
}

#[test]
fn lookahead_goes_back_part_of_the_way_every_k_steps() {
    let weight = weight();
    let sgd = || Sgd::builder([weight.shallow_clone()]).lr(1.0).build().unwrap();
    let mut opt = Lookahead::new(sgd(), 3, 0.5).unwrap();
    let values: Vec<f64> = (0..5)
        .map(|_| {
            descend(&mut opt, &weight);
            value(&weight)
        })
        .collect();
    assert_eq!(values, [7.0, 6.0, 6.5, 5.5, 4.5]);
    let mut resumed = Lookahead::new(sgd(), 3, 0.5).unwrap();
    let state = opt.state_dict().unwrap();
    resumed.load_state_dict(&state).unwrap();
    descend(&mut resumed, &weight);
    assert_eq!(value(&weight), 5.0, "the slow weight is the saved 6.5, not the 4.5 at which `resumed` was built");

    for (key, entry) in [("slow.1", Entry::Int(0)), ("slower", Entry::Int(0)), ("steps", Entry::Int(3))] {
        let mut bad = opt.state_dict().unwrap();
        bad.insert(key, entry);
        let said = resumed.load_state_dict(&bad).unwrap_err().to_string();
        assert!(said.contains(key), "{said}");
    }
    assert!(Lookahead::new(sgd(), 0, 0.5).unwrap_err().to_string().starts_with("k is 0"));
    assert!(Lookahead::new(sgd(), 1, 1.5).unwrap_err().to_string().starts_with("alpha is 1.5"));
}

#[test]
fn lookahead_moves_float32_masters_with_its_weights() {
    let weight = weight().detach().to_kind(Kind::BFloat16).set_requires_grad(true);
    let sgd = Sgd::builder([weight.shallow_clone()]).lr(1.0).low_precision(LowPrecision::MasterCopy).build().unwrap();
    let mut opt = Lookahead::new(sgd, 3, 0.5).unwrap();
    let values: Vec<f64> = (0..5)
        .map(|_| {
            weight.sum(Kind::Float).backward();
            opt.step().unwrap();
            opt.zero_grad().unwrap();
            value(&weight)
        })
        .collect();
    assert_eq!(values, [7.0, 6.0, 6.5, 5.5, 4.5]);
}

#[test]
fn a_joint_optimizer_refuses_equal_parameter_names() {
    let [one, other] = [weight(), weight()];
    let sgd = |weight: &Tensor| Sgd::builder([("weight", weight)]).build().unwrap();
    let error = Joint::new(sgd(&one), sgd(&other)).unwrap_err().to_string();
    assert!(error.starts_with("parameter `weight`: both optimizers have a parameter of this name"), "{error}");
}

#[test]
fn lookahead_keeps_float32_precision_of_bfloat16_weights() {
    let weight = Tensor::ones([1], (Kind::BFloat16, CPU)).set_requires_grad(true);
    let sgd =
        || Sgd::builder([weight.shallow_clone()]).lr(1e-4).low_precision(LowPrecision::MasterCopy).build().unwrap();
    let mut opt = Lookahead::new(sgd(), 5, 0.5).unwrap();
    let step = |opt: &mut Lookahead<Sgd>| {
        weight.sum(Kind::Float).backward();
        opt.step().unwrap();
        opt.zero_grad().unwrap();
    };
    (0..502).for_each(|_| step(&mut opt));
    let state = opt.state_dict().unwrap().copied().unwrap();
    let mut resumed = Lookahead::new(sgd(), 5, 0.5).unwrap();
    resumed.load_state_dict(&state).unwrap();
    (0..498).for_each(|_| step(&mut resumed));
    // 1000 steps of 1e-4 move the masters by 0.1 without Lookahead, and half as far with it.
    assert!((value(&weight) - 0.95).abs() < 0.003, "{}", value(&weight));
}

#[test]
fn sam_steps_by_the_gradient_of_the_worst_point_nearby() {
    let weights = [weight(), weight(), weight()];
    let sgd = Sgd::builder(&weights).lr(0.25).build().unwrap();
    let mut opt = Sam::new(sgd, 5.0).unwrap();
    let loss = || weights[0].square().sum(Kind::Double) * 1.5 + weights[1].square().sum(Kind::Double) * 2.0;
    // Gradients 24 and 32, of norm 40: up by 3 and 4; the gradients there are 33 and 48.
    loss().backward();
    opt.ascend().unwrap();
    assert_eq!((value(&weights[0]).round(), value(&weights[1]).round(), value(&weights[2])), (11.0, 12.0, 8.0));
    assert!(!weights[0].grad().defined());
    loss().backward();
    opt.step().unwrap();
    opt.zero_grad().unwrap();
    assert!((value(&weights[0]) - (8.0 - 33.0 / 4.0)).abs() < 1e-9, "{}", value(&weights[0]));
    assert!((value(&weights[1]) - (8.0 - 48.0 / 4.0)).abs() < 1e-9);
    assert_eq!(value(&weights[2]), 8.0);
    // Without an ascent, `step` is the inner optimizer's.
    let before = value(&weights[2]);
    weights[2].sum(Kind::Double).backward();
    opt.step().unwrap();
    assert_eq!(value(&weights[2]), before - 0.25);
    opt.zero_grad().unwrap();
    opt.ascend().unwrap();
    assert_eq!(value(&weights[2]), before - 0.25, "no gradients, no ascent");
    assert!(Sam::new(Sgd::builder(&weights).build().unwrap(), -1.0).unwrap_err().to_string().starts_with("rho is -1"));
}

#[test]
fn adaptive_sam_moves_each_parameter_relative_to_its_size() {
    let weights = [weight(), weight()];
    let _ = tch::no_grad(|| weights[1].shallow_clone().fill_(-2.0));
    let mut opt = Sam::new(Sgd::builder(&weights).lr(0.25).build().unwrap(), 0.5).unwrap().adaptive(true);
    // Gradients 3 and 16, times the sizes 8 and 2: 24 and 32, of norm 40. Then 0.5 * size * 24 / 40, and so on.
    (&weights[0] * 3.0 + &weights[1] * 16.0).sum(Kind::Double).backward();
    opt.ascend().unwrap();
    assert!((value(&weights[0]) - (8.0 + 0.5 * 8.0 * 24.0 / 40.0)).abs() < 1e-9, "{}", value(&weights[0]));
    assert!((value(&weights[1]) - (-2.0 + 0.5 * 2.0 * 32.0 / 40.0)).abs() < 1e-9, "{}", value(&weights[1]));
    opt.step().unwrap();
    assert_eq!((value(&weights[0]), value(&weights[1])), (8.0, -2.0), "moved back, and no gradient to step with");
    (&weights[0] * f64::INFINITY).sum(Kind::Double).backward();
    opt.ascend().unwrap();
    assert_eq!(value(&weights[0]), 8.0, "an infinite gradient moves nothing");
}

#[test]
fn sam_loads_no_state_between_an_ascent_and_its_step() {
    let weight = weight();
    let mut opt = Sam::new(Sgd::builder([weight.shallow_clone()]).lr(0.0).build().unwrap(), 1.0).unwrap();
    let state = opt.state_dict().unwrap();
    weight.square().sum(Kind::Double).backward();
    opt.ascend().unwrap();
    assert!(matches!(opt.load_state_dict(&state), Err(StateError::NotSaved { .. })));
    // As when a run is rolled back to an earlier checkpoint.
    opt.step_skipped().unwrap();
    opt.load_state_dict(&state).unwrap();
    assert_eq!(value(&weight), 8.0);
}

#[test]
fn a_skipped_step_takes_sam_back_to_where_it_was() {
    let weight = weight();
    let mut opt = Sam::new(Sgd::builder([&weight]).lr(0.1).build().unwrap(), 1.0).unwrap();
    let start = weight.detach().copy();
    for factor in [1.0, f64::INFINITY] {
        (weight.square().sum(Kind::Double) * factor).backward();
        opt.ascend().unwrap();
        assert_eq!(weight.equal(&start), factor.is_infinite(), "an infinite gradient moves nothing");
        assert!(matches!(opt.state_dict(), Err(StateError::NotSaved { .. })), "the weights are moved");
        opt.step_skipped().unwrap();
        opt.zero_grad().unwrap();
        assert!(weight.equal(&start), "after a gradient of {factor}");
        opt.state_dict().unwrap();
    }
}

#[test]
fn lookahead_starts_from_loaded_weights() {
    let weight = weight();
    let mut opt = Lookahead::new(Sgd::builder([&weight]).lr(0.0).build().unwrap(), 1, 0.5).unwrap();
    let load = |value: f64| drop(tch::no_grad(|| weight.shallow_clone().fill_(value)));
    let step = |opt: &mut Lookahead<Sgd>| {
        weight.square().sum(Kind::Double).backward();
        opt.step().unwrap();
        opt.zero_grad().unwrap();
    };
    load(8.0);
    step(&mut opt);
    assert_eq!(value(&weight), 8.0, "loaded before the first step");
    load(2.0);
    opt.params_changed().unwrap();
    step(&mut opt);
    assert_eq!(value(&weight), 2.0, "loaded later");
    assert!(opt.behavior().keeps_copies);
}

#[test]
fn a_boxed_optimizer_is_wrapped_and_saved() {
    let weight = weight();
    let boxed = |weight: &Tensor| -> Box<dyn Optimizer> {
        Box::new(Sgd::builder([("weight", weight)]).lr(0.1).momentum(0.9).build().unwrap())
    };
    let mut opt = Lookahead::new(boxed(&weight), 2, 0.5).unwrap();
    for _ in 0..3 {
        weight.square().sum(Kind::Double).backward();
        opt.step().unwrap();
        opt.zero_grad().unwrap();
    }
    let state = opt.state_dict().unwrap();
    assert!(state.get("slow.weight").is_ok() && state.get("inner.state.weight.momentum_buffer").is_ok(), "{state:?}");
    let mut resumed: Box<dyn Optimizer> = Box::new(Lookahead::new(boxed(&weight), 2, 0.5).unwrap());
    resumed.load_state_dict(&state).unwrap();
    crate::state::assert_same(&resumed.state_dict().unwrap(), &state, "boxed twice");
    let by_reference: &mut dyn Optimizer = &mut opt;
    crate::state::assert_same(&by_reference.state_dict().unwrap(), &state, "by reference");
}

/// Muon for the hidden matrix, AdamW for the rest.
fn muon_and_adamw(vs: &nn::VarStore) -> Joint<Muon, AdamW> {
    let (hidden, others) = hidden_matrices(vs, |name| name.starts_with("head"));
    assert_eq!(hidden.iter().map(|param| param.name().unwrap()).collect::<Vec<_>>(), ["hidden.weight"]);
    let muon = Muon::builder(hidden).lr(0.02).build().unwrap();
    Joint::new(muon, AdamW::builder(others).lr(1e-3).decay_groups().build().unwrap()).unwrap()
}

fn network(seed: i64) -> nn::VarStore {
    tch::manual_seed(seed);
    let vs = nn::VarStore::new(CPU);
    nn::linear(vs.root() / "hidden", 4, 4, Default::default());
    nn::linear(vs.root() / "head", 4, 2, Default::default());
    vs
}

fn train(vs: &nn::VarStore, opt: &mut dyn Optimizer) {
    let loss = vs.trainable_variables().iter().map(|param| param.sin().sum(Kind::Float)).reduce(|sum, it| sum + it);
    loss.unwrap().backward();
    opt.step().unwrap();
    opt.zero_grad().unwrap();
}

#[test]
fn a_joint_optimizer_has_the_rates_steps_and_states_of_both() {
    let (apart, together) = (network(1), network(1));
    let (hidden, others) = hidden_matrices(&apart, |name| name.starts_with("head"));
    let mut muon = Muon::builder(hidden).lr(0.02).build().unwrap();
    let mut adamw = AdamW::builder(others).lr(0.5).build().unwrap();
    let mut opt = muon_and_adamw(&together);
    assert_eq!((opt.num_groups(), opt.lr(0), opt.lr(2)), (3, Some(0.02), Some(1e-3)));
    opt.set_lr(1, 0.5).unwrap();
    opt.set_lr(2, 0.5).unwrap();
    adamw.group_mut(0).unwrap().weight_decay(0.01).apply().unwrap();
    assert!(matches!(opt.set_lr(3, 0.5), Err(OptimizerError::NoSuchGroup { group: 3, groups: 3 })));
    assert!(opt.momentum(0).is_some() && opt.momentum(3).is_none() && !opt.takes_grad_scale());
    // Biases decay in only one of the two, so the weights, which decay in both, are compared.
    for _ in 0..3 {
        train(&together, &mut opt);
        let loss =
            apart.trainable_variables().iter().map(|param| param.sin().sum(Kind::Float)).reduce(|sum, it| sum + it);
        loss.unwrap().backward();
        for opt in [&mut muon as &mut dyn Optimizer, &mut adamw] {
            opt.step().unwrap();
            opt.zero_grad().unwrap();
        }
    }
    for name in ["hidden.weight", "head.weight"] {
        assert!(apart.variables()[name].equal(&together.variables()[name]), "{name}");
    }

    let state = opt.state_dict().unwrap().copied().unwrap();
    let mut resumed = muon_and_adamw(&together);
    resumed.load_state_dict(&state).unwrap();
    crate::state::assert_same(&resumed.state_dict().unwrap(), &state, "resumed");
    // A state whose second part does not fit leaves the first optimizer unchanged.
    let mut fresh = muon_and_adamw(&together);
    let before = fresh.state_dict().unwrap().copied().unwrap();
    let mut broken = state.copied().unwrap();
    broken.insert("second.param_groups.0.lr", Entry::Float(-1.0));
    assert!(fresh.load_state_dict(&broken).is_err());
    crate::state::assert_same(&fresh.state_dict().unwrap(), &before, "refused");

    let both = Sgd::builder(&together).build().unwrap();
    let shared = Joint::new(Sgd::builder(&together).build().unwrap(), both).unwrap_err();
    assert!(shared.to_string().contains("both optimizers have it"), "{shared}");
}

#[test]
fn averages_and_states_refuse_weights_that_sam_has_moved() {
    let vs = nn::VarStore::new(CPU);
    let weight = vs.root().ones("weight", &[3]);
    let mut opt = Sam::new(Sgd::builder(&vs).lr(0.1).build().unwrap(), 1.0).unwrap();
    let mut ema = AveragedModel::new(&vs, Averaging::Ema { decay: 0.5 }).unwrap();
    ema.update().unwrap();
    weight.square().sum(Kind::Float).backward();
    opt.ascend().unwrap();
    let refused = [ema.update(), ema.apply(|| ()), ema.copy_to_model()];
    for error in refused.map(|result| result.unwrap_err().to_string()) {
        assert!(error.starts_with("parameter `weight`: SAM's `ascend` has moved it"), "{error}");
    }
    assert_eq!(ema.n_averaged(), 1);
    assert!(matches!(vs.state_dict(), Err(StateError::NotSaved { .. })));
    // Another model's weights have not been moved.
    let other = nn::VarStore::new(CPU);
    let _ = other.root().ones("weight", &[3]);
    other.state_dict().unwrap();
    weight.square().sum(Kind::Float).backward();
    opt.step().unwrap();
    ema.update().unwrap();
    vs.state_dict().unwrap();
    let trained = weight.detach().copy();
    weight.square().sum(Kind::Float).backward();
    opt.ascend().unwrap();
    // Loading is refused too, because the step would undo it.
    let mut vs = vs;
    let state = other.state_dict().unwrap();
    assert!(matches!(vs.load_state_dict(&state), Err(StateError::NotSaved { .. })));
    let mut second = Sam::new(Sgd::builder(&vs).lr(0.1).build().unwrap(), 1.0).unwrap();
    let error = second.ascend().unwrap_err().to_string();
    assert!(error.starts_with("parameter `weight`: another optimizer's `ascend` has moved it"), "{error}");
    assert!(!weight.equal(&trained));
    drop(opt);
    assert!(weight.equal(&trained), "dropping the optimizer sets the weights back");
    vs.load_state_dict(&state).unwrap();
}

#[test]
fn sam_does_not_move_along_an_infinite_gradient_and_reports_it_to_a_scaler() {
    let weight = weight();
    let mut opt = Sam::new(Sgd::builder([&weight]).lr(0.1).build().unwrap(), 1.0).unwrap();
    let start = weight.detach().copy();
    for (factor, flag) in [(1.0, 0.0), (f64::INFINITY, 1.0), (f64::NAN, 1.0)] {
        (weight.square().sum(Kind::Double) * factor).backward();
        opt.ascend().unwrap();
        assert_eq!(weight.equal(&start), flag == 1.0, "{factor}");
        let flags: Vec<f64> = opt.used_found_inf().iter().map(|flag| flag.double_value(&[])).collect();
        assert_eq!(flags, [flag], "{factor}");
        opt.step_skipped().unwrap();
        assert!(weight.equal(&start) && opt.used_found_inf().is_empty());
    }
}

#[test]
fn slow_weights_and_copied_states_hold_no_graph() {
    let weight = weight();
    let mut opt = Lookahead::new(Sgd::builder([&weight]).lr(0.1).build().unwrap(), 2, 0.5).unwrap();
    weight.square().sum(Kind::Double).backward();
    opt.step().unwrap();
    let is_free = |state: &StateDict| match state.get("slow.0").unwrap() {
        Entry::Tensor(slow) => !slow.requires_grad(),
        other => panic!("{other:?}"),
    };
    let state = opt.state_dict().unwrap();
    assert!(is_free(&state));
    opt.load_state_dict(&state.copied().unwrap()).unwrap();
    assert!(is_free(&opt.state_dict().unwrap()));
    let mut own = StateDict::new();
    own.insert("weight", Entry::Tensor(weight.shallow_clone()));
    let copied = own.copied().unwrap();
    assert!(!copied.tensor("weight", &weight.size(), Kind::Double).unwrap().requires_grad());
}

#[test]
fn a_joint_step_that_the_second_refuses_changes_nothing() {
    let (first, second) = (weight(), weight());
    let sgd = || Sgd::builder([first.shallow_clone()]).lr(1.0).build().unwrap();
    let mut free = SgdScheduleFree::builder([second.shallow_clone()]).lr(1.0).build().unwrap();
    free.eval().unwrap();
    let mut opt = Joint::new(sgd(), free).unwrap();
    let step = |opt: &mut dyn Optimizer| {
        (&first + &second).sum(Kind::Double).backward();
        let stepped = opt.step();
        opt.zero_grad().unwrap();
        (stepped, value(&first), value(&second))
    };
    let (refused, one, other) = step(&mut opt);
    assert!(matches!(refused, Err(OptimizerError::InEvaluation)), "{refused:?}");
    assert_eq!(one, 8.0);
    assert_eq!(other, 8.0);
    opt.optimizers_mut().1.train().unwrap();
    assert!(matches!(step(&mut opt), (Ok(()), 7.0, 7.0)));
    let lbfgs = Lbfgs::builder([second.shallow_clone()]).build().unwrap();
    let mut opt = Joint::new(Lookahead::new(sgd(), 2, 0.5).unwrap(), lbfgs).unwrap();
    assert!(matches!(step(&mut opt), (Err(OptimizerError::NeedsClosure), 7.0, 7.0)));
}

#[test]
fn what_would_restart_or_move_an_average_is_refused() {
    let weight = weight();
    let free = || SgdScheduleFree::builder([weight.shallow_clone()]).lr(1.0).build().unwrap();
    let error = Lookahead::new(free(), 2, 1.0).unwrap_err().to_string();
    assert!(error.contains("begin that average anew"), "{error}");
    let mut sam = Sam::new(free(), 0.1).unwrap();
    weight.sum(Kind::Double).backward();
    sam.ascend().unwrap();
    let error = sam.inner_mut().eval().unwrap_err().to_string();
    assert!(error.contains("SAM's `ascend` has moved it"), "{error}");
    sam.step_skipped().unwrap();
    sam.inner_mut().eval().unwrap();
    assert_eq!(value(&weight), 8.0);
}
