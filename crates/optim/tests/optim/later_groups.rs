//! Parameter groups that are added during training: in wrappers, in joint optimizers, and in saved states.

use overdrive_core::{Optimizer, Stateful, TchOptimizer};
use overdrive_optim::{AdamW, Joint, Lookahead, RmsProp, Sam, Sgd};
use tch::nn::OptimizerConfig;
use tch::{Kind, Tensor, nn};

use crate::{CPU, DOUBLE};

fn weight() -> Tensor {
    (Tensor::ones([1], DOUBLE) * 8.0).set_requires_grad(true)
}

fn sgd(name: &str, weight: &Tensor) -> Sgd {
    Sgd::builder([(name, weight)]).lr(1.0).build().unwrap()
}

fn values(weights: &[&Tensor]) -> Vec<f64> {
    weights.iter().map(|weight| weight.double_value(&[0])).collect()
}

/// A step with a gradient of 1.
fn descend(opt: &mut dyn Optimizer, weights: &[&Tensor]) {
    weights.iter().for_each(|weight| weight.sum(Kind::Double).backward());
    opt.step().unwrap();
    opt.zero_grad().unwrap();
}

#[test]
fn sam_ascends_along_a_group_added_later() {
    let [one, other] = [weight(), weight()];
    let mut opt = Sam::new(sgd("one", &one), 0.5).unwrap();
    opt.inner_mut().add_param_group(Sgd::group([("other", &other)])).unwrap();
    [&one, &other].iter().for_each(|weight| weight.square().sum(Kind::Double).backward());
    opt.ascend().unwrap();
    // Half a unit along the gradient (16, 16) is 0.35 in each direction.
    for moved in values(&[&one, &other]) {
        assert!((moved - 8.0 - 0.5 / 2f64.sqrt()).abs() < 1e-9, "{moved}");
    }
    descend(&mut opt, &[&one, &other]);
    assert_eq!(values(&[&one, &other]), [7.0, 7.0]);
}

#[test]
fn slow_weights_of_a_group_added_later_start_at_its_weights() {
    let [one, other] = [weight(), weight()];
    let mut opt = Lookahead::new(sgd("one", &one), 2, 0.5).unwrap();
    descend(&mut opt, &[&one, &other]);
    let _ = other.grad().zero_();
    opt.inner_mut().add_param_group(Sgd::group([("other", &other)])).unwrap();
    // Saved before the new group has slow weights.
    let state = opt.state_dict().unwrap().copied().unwrap();
    let rest = |opt: &mut Lookahead<Sgd>, one: &Tensor, other: &Tensor| {
        (0..3).for_each(|_| descend(opt, &[one, other]));
        values(&[one, other])
    };
    // one: 8, slow 8, 7, 6 -> 7, 6, 5 -> 6; other starts one step later: 8, 7 -> 7.5, 6.5, 5.5 -> 6.5
    assert_eq!(rest(&mut opt, &one, &other), [6.0, 6.5]);

    let [one, other] = [weight() - 1.0, weight()].map(|it| it.detach().set_requires_grad(true));
    let mut resumed = Lookahead::new(sgd("one", &one), 2, 0.5).unwrap();
    resumed.inner_mut().add_param_group(Sgd::group([("other", &other)])).unwrap();
    resumed.load_state_dict(&state).unwrap();
    assert_eq!(rest(&mut resumed, &one, &other), [6.0, 6.5]);
}

#[test]
fn wrappers_include_variables_that_tchs_optimizer_adds() {
    let vs = nn::VarStore::new(CPU);
    let one = vs.root().ones("one", &[1]);
    let tch = || TchOptimizer::new(nn::Sgd::default().build(&vs, 1.0).unwrap());
    let (mut sam, mut lookahead) = (Sam::new(tch(), 0.5).unwrap(), Lookahead::new(tch(), 1, 0.5).unwrap());
    lookahead.step().unwrap();
    let other = vs.root().ones("other", &[1]);
    let backward = || (one.square() + other.square()).sum(Kind::Float).backward();
    // tch adds a new variable at its next step.
    sam.step().unwrap();
    backward();
    sam.ascend().unwrap();
    assert!(values(&[&other])[0] > 1.3, "{other}");
    sam.step_skipped().unwrap();

    lookahead.step().unwrap();
    backward();
    let before = values(&[&one, &other]);
    lookahead.step().unwrap();
    // A step of -2, then half of it back.
    assert_eq!(values(&[&one, &other]), [before[0] - 1.0, before[1] - 1.0]);
}

#[test]
fn slow_weights_saved_without_names_are_loaded_by_order() {
    let [one, other] = [weight(), weight()];
    let unnamed = Sgd::builder([one.shallow_clone()]).lr(1.0).build().unwrap();
    let mut opt = Lookahead::new(unnamed, 2, 0.5).unwrap();
    descend(&mut opt, &[&one]);
    let mut named = Lookahead::new(sgd("other", &other), 2, 0.5).unwrap();
    named.load_state_dict(&opt.state_dict().unwrap()).unwrap();
    descend(&mut named, &[&other]);
    // A step from 8 to 7, then half of the way back to the slow weight, 8.
    assert_eq!(values(&[&other]), [7.5]);
}

#[test]
fn groups_of_a_joint_optimizer_keep_their_numbers() {
    let weights = [weight(), weight(), weight(), weight()];
    let joint = || {
        let second = AdamW::builder([("b", &weights[1])]).lr(0.2).build().unwrap();
        Joint::new(sgd("a", &weights[0]), second).unwrap()
    };
    let grow = |opt: &mut Joint<Sgd, AdamW>| {
        opt.optimizers_mut().1.add_param_group(AdamW::group([("d", &weights[3])]).lr(0.4)).unwrap();
        opt.optimizers_mut().0.add_param_group(Sgd::group([("c", &weights[2])]).lr(0.3)).unwrap();
    };
    let rates = |opt: &Joint<Sgd, AdamW>| (0..opt.num_groups()).filter_map(|group| opt.lr(group)).collect::<Vec<_>>();
    let mut opt = joint();
    assert_eq!(rates(&opt), [1.0, 0.2]);
    grow(&mut opt);
    assert_eq!(rates(&opt), [1.0, 0.2, 0.4, 0.3]);
    opt.set_lr(2, 0.5).unwrap();
    assert_eq!(rates(&opt), [1.0, 0.2, 0.5, 0.3]);
    assert!(opt.set_lr(4, 0.5).unwrap_err().to_string().contains("group 4"));

    // An optimizer whose groups were added in another order takes over the saved order.
    let state = opt.state_dict().unwrap();
    let mut resumed = joint();
    resumed.optimizers_mut().0.add_param_group(Sgd::group([("c", &weights[2])])).unwrap();
    resumed.optimizers_mut().1.add_param_group(AdamW::group([("d", &weights[3])])).unwrap();
    resumed.load_state_dict(&state).unwrap();
    assert_eq!(rates(&resumed), [1.0, 0.2, 0.5, 0.3]);
    for order in ["first second", "first second second third", "second second second first", ""] {
        let mut bad = opt.state_dict().unwrap();
        bad.insert("order", overdrive_core::Entry::Text(order.to_owned()));
        let said = resumed.load_state_dict(&bad).unwrap_err().to_string();
        assert!(said.contains("2 times \"first\" and 2 times \"second\""), "{said}");
    }
}

#[test]
fn a_state_with_more_groups_is_refused() {
    let [one, other] = [weight(), weight()];
    let mut opt = sgd("one", &one);
    opt.add_param_group(Sgd::group([("other", &other)])).unwrap();
    let state = opt.state_dict().unwrap();
    let said = sgd("one", &one).load_state_dict(&state).unwrap_err().to_string();
    assert!(said.starts_with("`param_groups` should be 1 groups") && said.ends_with("but is 2 groups"), "{said}");
}

#[test]
fn a_momentum_that_was_cycled_down_to_0_keeps_its_state_when_saved() {
    let [one, other] = [weight(), weight()];
    let build = |weight: &Tensor| Sgd::builder([weight.shallow_clone()]).lr(1.0).momentum(0.5).build().unwrap();
    let mut opt = build(&one);
    descend(&mut opt, &[&one]);
    opt.set_momentum(0, 0.0).unwrap();
    let mut resumed = build(&other);
    resumed.load_state_dict(&opt.state_dict().unwrap()).unwrap();
    assert_eq!(resumed.momentum(0), Some(0.0));
    resumed.set_momentum(0, 0.5).unwrap();
    descend(&mut resumed, &[&other]);
    // A step of 1, plus 0.5 times the step before.
    assert_eq!(values(&[&other]), [6.5]);
}

#[test]
fn nesterov_with_a_momentum_cycled_down_to_0_can_be_changed_and_saved() {
    let weight = weight();
    let build = || Sgd::builder([("weight", &weight)]).lr(1.0).momentum(0.5).nesterov(true).build().unwrap();
    let mut opt = build();
    descend(&mut opt, &[&weight]);
    opt.set_momentum(0, 0.0).unwrap();
    opt.group_mut(0).unwrap().lr(0.5).apply().unwrap();
    let mut resumed = build();
    resumed.load_state_dict(&opt.state_dict().unwrap()).unwrap();
    assert_eq!((resumed.momentum(0), resumed.lr(0)), (Some(0.0), Some(0.5)));
    // An optimizer without momentum state refuses a momentum.
    let mut other = Sgd::builder([("weight", &weight)]).build().unwrap();
    assert!(other.group_mut(0).unwrap().momentum(0.5).apply().is_err());
    assert!(Sgd::builder([("weight", &weight)]).nesterov(true).build().is_err());
}

#[test]
fn a_state_without_momentum_loads_into_an_optimizer_with_it_and_back() {
    let weight = weight();
    let build = |momentum| RmsProp::builder([("weight", &weight)]).lr(0.1).momentum(momentum).build().unwrap();
    let (mut without, mut with) = (build(0.0), build(0.9));
    descend(&mut without, &[&weight]);
    descend(&mut with, &[&weight]);
    let [of_without, of_with] = [&without, &with].map(|opt| opt.state_dict().unwrap().copied().unwrap());
    with.load_state_dict(&of_without).unwrap();
    assert_eq!(with.momentum(0), None, "the options come with the state");
    with.load_state_dict(&of_with).unwrap();
    assert_eq!(with.momentum(0), Some(0.9));
    // As a failed load of a joint optimizer restores the previous state.
    without.load_state_dict(&of_with).unwrap();
    without.load_state_dict(&of_without).unwrap();
}

#[test]
fn a_joint_optimizer_steps_no_parameter_twice() {
    let [one, other] = [weight(), weight()];
    let mut opt = Joint::new(sgd("one", &one), sgd("other", &other)).unwrap();
    opt.optimizers_mut().1.add_param_group(Sgd::group([("one again", &one)])).unwrap();
    one.sum(Kind::Double).backward();
    let said = opt.step().unwrap_err().to_string();
    assert!(said.contains("both optimizers have it") && values(&[&one]) == [8.0], "{said}");
}
