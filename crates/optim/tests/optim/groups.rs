//! Parameter groups: their own options, the optimizer's defaults, and later changes.

use overdrive_core::{Entry, Optimizer, OptimizerError, Stateful};
use overdrive_optim::{Adam, AdamW, Lion, Muon, Sgd};
use tch::{Kind, Tensor, nn};

use crate::{CPU, params, set_grads};

fn option(opt: &impl Stateful, group: usize, name: &str) -> f64 {
    opt.state_dict().unwrap().float(&format!("param_groups.{group}.{name}")).unwrap()
}

fn names(opt: &impl Stateful, group: usize) -> Vec<String> {
    let state = opt.state_dict().unwrap();
    let name = |place| Some(state.text(&format!("param_groups.{group}.param_names.{place}")).ok()?.to_owned());
    (0..).map_while(name).collect()
}

/// Two layers with a norm between them.
fn model() -> nn::VarStore {
    let vs = nn::VarStore::new(CPU);
    nn::linear(vs.root() / "embed", 4, 6, Default::default());
    nn::layer_norm(vs.root() / "norm", vec![6], Default::default());
    nn::linear(vs.root() / "layer" / 0, 6, 6, Default::default());
    nn::linear(vs.root() / "layer" / 1, 6, 2, Default::default());
    vs
}

#[test]
fn a_groups_options_override_the_optimizers_in_whichever_order_they_are_set() {
    let build = |defaults_first: bool| {
        let group = AdamW::group(params(1)).weight_decay(0.0);
        let opt = AdamW::builder(params(2));
        match defaults_first {
            true => opt.lr(1e-2).weight_decay(0.5).add_param_group(group),
            false => opt.add_param_group(group).weight_decay(0.5).lr(1e-2),
        }
        .build()
        .unwrap()
    };
    for opt in [build(true), build(false)] {
        assert_eq!((opt.lr(0), opt.lr(1)), (Some(1e-2), Some(1e-2)));
        assert_eq!((option(&opt, 0, "weight_decay"), option(&opt, 1, "weight_decay")), (0.5, 0.0));
    }
}

#[test]
fn a_group_added_later_has_the_builders_options_and_trains() {
    let (first, later) = (params(2), params(3));
    let mut opt = Sgd::builder(&first).lr(0.5).momentum(0.9).build().unwrap();
    set_grads(&first, 1);
    opt.step().unwrap();
    opt.set_lr(0, 0.1).unwrap();
    opt.add_param_group(Sgd::group(&later).momentum(0.0)).unwrap();
    assert_eq!(
        (opt.num_groups(), opt.lr(0), opt.lr(1)),
        (2, Some(0.1), Some(0.5)),
        "the builder's, not the first group's"
    );
    let before: Vec<_> = later.iter().map(|param| param.detach().copy()).collect();
    later.iter().for_each(|param| param.sum(param.kind()).backward());
    opt.step().unwrap();
    for (param, before) in later.iter().zip(&before) {
        assert!(param.equal(&(before - 0.5)), "{param} {before}");
    }
    assert_eq!(opt.params().len(), 5);

    let again = opt.add_param_group(Sgd::group(&later[..1]));
    assert!(again.unwrap_err().to_string().contains("given twice"));
    assert!(opt.add_param_group(Sgd::group(params(1)).lr(-1.0)).is_err());
    assert!(matches!(opt.add_param_group(Sgd::group(Vec::<Tensor>::new())), Err(OptimizerError::NoParameters)));
    assert_eq!((opt.num_groups(), opt.params().len()), (2, 5), "refused groups are not added");
}

#[test]
fn options_change_during_training_or_an_error_changes_none() {
    let ours = params(2);
    let mut opt = Adam::builder(&ours).build().unwrap();
    set_grads(&ours, 1);
    opt.step().unwrap();
    opt.group_mut(0).unwrap().lr(0.25).weight_decay(0.125).betas(0.5, 0.75).apply().unwrap();
    assert_eq!((opt.lr(0), option(&opt, 0, "weight_decay"), opt.momentum(0)), (Some(0.25), 0.125, Some(0.5)));
    let refused = opt.group_mut(0).unwrap().lr(1.0).eps(-1.0).apply().unwrap_err();
    assert!(matches!(refused, OptimizerError::InvalidOption { option: "eps", .. }), "{refused}");
    let refused = opt.group_mut(0).unwrap().lr(1.0).amsgrad(true).apply().unwrap_err();
    assert!(matches!(refused, OptimizerError::OtherState), "{refused}");
    assert_eq!(opt.lr(0), Some(0.25));
    assert!(matches!(opt.group_mut(1), Err(OptimizerError::NoSuchGroup { group: 1, groups: 1 })));
}

#[test]
fn vectors_and_biases_do_not_decay() {
    let vs = model();
    let opt = AdamW::builder(&vs).weight_decay(0.1).decay_groups().build().unwrap();
    assert_eq!(names(&opt, 0), ["embed.weight", "layer.0.weight", "layer.1.weight"]);
    assert_eq!(names(&opt, 1), ["embed.bias", "norm.weight", "norm.bias", "layer.0.bias", "layer.1.bias"]);
    assert_eq!((option(&opt, 0, "weight_decay"), option(&opt, 1, "weight_decay")), (0.1, 0.0));
    let opt =
        Lion::builder(&vs).weight_decay(0.1).decay_groups_except(|name| name.starts_with("embed")).build().unwrap();
    assert_eq!(names(&opt, 0), ["layer.0.weight", "layer.1.weight"]);
    // Tensors without names are split by their dimensions, and an empty group is left out.
    let matrices: Vec<_> = vs.trainable_variables().into_iter().filter(|param| param.dim() > 1).collect();
    assert_eq!(Muon::builder(matrices).decay_groups().build().unwrap().num_groups(), 1);
}

#[test]
fn later_layers_have_the_larger_rates() {
    let vs = model();
    let layer_of = |name: &str| match name.split('.').collect::<Vec<_>>()[..] {
        ["layer", number, _] => number.parse::<usize>().unwrap() + 1,
        _ => 0,
    };
    let opt = AdamW::builder(&vs).lr(0.1).weight_decay(0.5).decay_groups().layer_decay(0.5, layer_of).build().unwrap();
    let rates: Vec<_> = (0..opt.num_groups()).map(|group| (opt.lr(group).unwrap(), names(&opt, group).len())).collect();
    assert_eq!(rates, [(0.025, 1), (0.05, 1), (0.1, 1), (0.025, 3), (0.05, 1), (0.1, 1)]);
    assert_eq!((option(&opt, 0, "weight_decay"), option(&opt, 3, "weight_decay")), (0.5, 0.0));

    let refused = AdamW::builder(params(2)).layer_decay(0.5, |_| 0).build().unwrap_err();
    assert!(refused.to_string().contains("number 0: it has no name"), "{refused}");
    assert!(AdamW::builder(&vs).layer_decay(0.0, |_| 0).build().is_err());
}

#[test]
fn all_parameters_or_none_have_names_and_names_are_unique() {
    let [one, other] = [params(1).remove(0), params(1).remove(0)];
    let twice = Sgd::builder([("weight", &one), ("weight", &other)]).build().unwrap_err();
    assert!(twice.to_string().starts_with("parameter `weight`: another parameter has the same name"), "{twice}");
    let mixed = Sgd::builder([("weight", &one)]).add_param_group(Sgd::group([&other])).build().unwrap_err();
    assert!(mixed.to_string().contains("name all or none"), "{mixed}");
    let mixed = Sgd::builder([&one]).add_param_group(Sgd::group([("weight", &other)])).build().unwrap_err();
    assert!(mixed.to_string().contains("name all or none"), "{mixed}");
}

#[test]
fn a_state_is_loaded_by_name_and_not_by_order() {
    let tensors = || {
        let zeros = |size: i64| Tensor::zeros([size], (Kind::Float, CPU)).set_requires_grad(true);
        (zeros(3), zeros(3))
    };
    let build = |order: [(&str, &Tensor); 2]| AdamW::builder(order).lr(0.1).build().unwrap();
    let step = |opt: &mut AdamW, a: &Tensor, b: &Tensor| {
        (a.sum(Kind::Float) * 2.0 + b.sum(Kind::Float) * 5.0).backward();
        opt.step().unwrap();
        opt.zero_grad().unwrap();
    };
    let (a, b) = tensors();
    let mut opt = build([("a", &a), ("b", &b)]);
    step(&mut opt, &a, &b);
    let state = crate::state::copied(&opt.state_dict().unwrap());
    assert!(state.get("state.a.exp_avg").is_ok() && state.text("param_groups.0.param_names.1").unwrap() == "b");

    // The same parameters in another order, with equal shapes: only the names tell them apart.
    let (a2, b2) = tensors();
    let mut turned = build([("b", &b2), ("a", &a2)]);
    turned.load_state_dict(&state).unwrap();
    step(&mut opt, &a, &b);
    tch::no_grad(|| {
        a2.shallow_clone().copy_(&a.zeros_like());
        b2.shallow_clone().copy_(&b.zeros_like());
    });
    step(&mut turned, &a2, &b2);
    for key in ["state.a.exp_avg", "state.b.exp_avg_sq"] {
        let of = |opt: &AdamW| opt.state_dict().unwrap().tensor(key, &[3], Kind::Float).unwrap().copy();
        assert!(of(&opt).equal(&of(&turned)), "{key}");
    }

    // A state with other names is refused and changes nothing.
    let (a3, c3) = tensors();
    let mut other = build([("a", &a3), ("c", &c3)]);
    let before = crate::state::copied(&other.state_dict().unwrap());
    let refused = other.load_state_dict(&state).unwrap_err().to_string();
    assert!(refused.contains("`c`") && refused.contains("`b`"), "{refused}");
    crate::state::assert_same(&other.state_dict().unwrap(), &before, "refused");

    // Without names, states are loaded by order, and shapes are checked.
    let mut unnamed = AdamW::builder([&a3, &c3]).build().unwrap();
    unnamed.load_state_dict(&state).unwrap();
    assert!(unnamed.state_dict().unwrap().get("state.1.exp_avg").is_ok());
    let by_place = crate::state::copied(&unnamed.state_dict().unwrap());
    other.load_state_dict(&by_place).unwrap();
    assert!(other.state_dict().unwrap().get("state.c.exp_avg").is_ok());
    let mut wrong = crate::state::copied(&by_place);
    wrong.insert("state.1.exp_avg", Entry::Tensor(Tensor::zeros([4], (Kind::Float, CPU))));
    assert!(other.load_state_dict(&wrong).is_err());
}

#[test]
fn a_name_may_be_the_beginning_of_another() {
    let [short, long] = [params(1).remove(0), params(1).remove(0)];
    let build = || AdamW::builder([("a", &short), ("a.step", &long)]).build().unwrap();
    let mut opt = build();
    long.sum(long.kind()).backward();
    opt.step().unwrap();
    let state = crate::state::copied(&opt.state_dict().unwrap());
    let mut resumed = build();
    resumed.load_state_dict(&state).unwrap();
    crate::state::assert_same(&resumed.state_dict().unwrap(), &state, "resumed");
}
