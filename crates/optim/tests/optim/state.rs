//! States that are saved, loaded and refused.

use overdrive_core::{Entry, Optimizer, StateDict, StateError, Stateful};
use overdrive_optim::{
    Adadelta, Adafactor, Adagrad, Adam, AdamW, AdamWScheduleFree, Adamax, Asgd, InBackward, Lamb, Lars, Lion,
    LowPrecision, Muon, NAdam, Prodigy, RAdam, RmsProp, Rprop, Sgd, SgdScheduleFree,
};
use tch::{Kind, Tensor};

use crate::{CPU, params, set_grads};

pub trait Trained: Optimizer + Stateful {}
impl<T: Optimizer + Stateful> Trained for T {}
type Make = fn(&[Tensor]) -> Box<dyn Trained>;

/// Each algorithm in each of its forms, with every slot in use.
pub const ALL: &[(&str, Make)] = &[
    ("fused Adam", |p| Box::new(Adam::builder(p).lr(0.01).amsgrad(true).weight_decay(0.1).build().unwrap())),
    ("foreach Adam", |p| Box::new(Adam::builder(p).lr(0.01).amsgrad(true).foreach(true).build().unwrap())),
    ("fused AdamW", |p| Box::new(AdamW::builder(p).lr(0.01).build().unwrap())),
    ("foreach AdamW", |p| Box::new(AdamW::builder(p).lr(0.01).foreach(true).build().unwrap())),
    ("capturable AdamW", |p| Box::new(AdamW::builder(p).lr(0.01).foreach(true).capturable(true).build().unwrap())),
    ("fused SGD", |p| Box::new(Sgd::builder(p).lr(0.01).momentum(0.9).dampening(0.1).build().unwrap())),
    ("foreach SGD", |p| Box::new(Sgd::builder(p).lr(0.01).momentum(0.9).foreach(true).build().unwrap())),
    ("SGD without momentum", |p| Box::new(Sgd::builder(p).lr(0.01).build().unwrap())),
    ("RMSprop", |p| Box::new(RmsProp::builder(p).centered(true).momentum(0.9).build().unwrap())),
    ("fused Adagrad", |p| Box::new(Adagrad::builder(p).initial_accumulator_value(0.1).build().unwrap())),
    ("foreach Adagrad", |p| Box::new(Adagrad::builder(p).lr_decay(0.1).foreach(true).build().unwrap())),
    ("Adadelta", |p| Box::new(Adadelta::builder(p).weight_decay(0.1).build().unwrap())),
    ("Adamax", |p| Box::new(Adamax::builder(p).maximize(true).build().unwrap())),
    ("ASGD", |p| Box::new(Asgd::builder(p).lambd(0.1).t0(2.0).build().unwrap())),
    ("NAdam", |p| Box::new(NAdam::builder(p).weight_decay(0.1).decoupled_weight_decay(true).build().unwrap())),
    ("RAdam", |p| Box::new(RAdam::builder(p).lr(0.01).build().unwrap())),
    ("Rprop", |p| Box::new(Rprop::builder(p).build().unwrap())),
    ("Adafactor", |p| Box::new(Adafactor::builder(p).build().unwrap())),
    ("Muon", |p| Box::new(Muon::builder(p).lr(0.01).build().unwrap())),
    ("Lion", |p| Box::new(Lion::builder(p).lr(0.01).build().unwrap())),
    ("LAMB", |p| Box::new(Lamb::builder(p).lr(0.01).build().unwrap())),
    ("LARS", |p| Box::new(Lars::builder(p).build().unwrap())),
    ("schedule-free SGD", |p| Box::new(SgdScheduleFree::builder(p).lr(0.01).weight_decay(0.1).build().unwrap())),
    ("schedule-free AdamW", |p| Box::new(AdamWScheduleFree::builder(p).warmup_steps(3).build().unwrap())),
    ("Prodigy", |p| Box::new(Prodigy::builder(p).d0(1e-3).weight_decay(0.1).build().unwrap())),
    ("sliced Prodigy", |p| Box::new(Prodigy::builder(p).d0(1e-3).beta3(0.9).slice_p(3).build().unwrap())),
    ("two groups", |p| {
        Box::new(
            AdamW::builder(&p[..1]).lr(0.01).add_param_group(AdamW::group(&p[1..]).betas(0.5, 0.6)).build().unwrap(),
        )
    }),
    ("in backward", |p| Box::new(AdamW::builder(p).lr(0.01).build_in_backward().unwrap())),
];

/// A copy, as a checkpoint holds it.
pub fn copied(state: &StateDict) -> StateDict {
    let mut copy = StateDict::new();
    for (name, entry) in state.iter() {
        let entry = match entry {
            Entry::Tensor(tensor) => Entry::Tensor(tensor.detach().copy()),
            Entry::Bool(value) => Entry::Bool(*value),
            Entry::Int(value) => Entry::Int(*value),
            Entry::Float(value) => Entry::Float(*value),
            Entry::Text(value) => Entry::Text(value.clone()),
        };
        copy.insert(name, entry);
    }
    copy
}

pub fn assert_same(one: &StateDict, other: &StateDict, context: &str) {
    assert_eq!(one.len(), other.len(), "{context}");
    for ((name, one), (other_name, other)) in one.iter().zip(other.iter()) {
        assert_eq!(name, other_name, "{context}");
        match (one, other) {
            (Entry::Tensor(one), Entry::Tensor(other)) => assert!(one.equal(other), "{context}: {name}"),
            (one, other) => assert_eq!(format!("{one:?}"), format!("{other:?}"), "{context}: {name}"),
        }
    }
}

fn train(opt: &mut dyn Trained, params: &[Tensor], steps: std::ops::Range<i64>) {
    for step in steps {
        set_grads(params, step);
        opt.step().unwrap();
        opt.zero_grad().unwrap();
    }
}

#[test]
fn every_optimizer_resumes_bit_for_bit_from_a_saved_state() {
    // Parameters 2 and 5 lack gradients on odd steps. Training starts at step 1, so their first step is later than the
    // others'.
    for (name, make) in ALL {
        for saved_after in [1, 2, 5] {
            let first = params(6);
            let mut unbroken = make(&first);
            train(&mut *unbroken, &first, 1..1 + saved_after);
            let state = copied(&unbroken.state_dict().unwrap());
            let second: Vec<_> = first.iter().map(|param| param.detach().copy().set_requires_grad(true)).collect();
            let mut resumed = make(&second);
            if saved_after == 2 {
                // Load into an optimizer that has trained before.
                let elsewhere: Vec<_> = second.iter().map(|param| param.detach().copy()).collect();
                train(&mut *resumed, &second, 0..3);
                tch::no_grad(|| {
                    second.iter().zip(&elsewhere).for_each(|(param, was)| param.shallow_clone().copy_(was))
                });
            }
            match saved_after {
                5 => resumed.assign_state_dict(copied(&state)).unwrap(),
                _ => resumed.load_state_dict(&state).unwrap(),
            }
            assert_same(&resumed.state_dict().unwrap(), &state, name);
            let end = 8 + saved_after;
            train(&mut *unbroken, &first, 1 + saved_after..end);
            train(&mut *resumed, &second, 1 + saved_after..end);
            for (index, (one, other)) in first.iter().zip(&second).enumerate() {
                assert!(one.equal(other), "{name}, saved after {saved_after}, parameter {index}: {one} {other}");
            }
            assert_same(&unbroken.state_dict().unwrap(), &resumed.state_dict().unwrap(), name);
        }
    }
}

#[test]
fn names_are_pytorchs_and_saved_tensors_are_shared() {
    let ours = params(3);
    let mut opt = AdamW::builder(&ours).lr(0.5).build().unwrap();
    assert_eq!(opt.state_dict().unwrap().iter().filter(|(name, _)| name.starts_with("state.")).count(), 0);
    set_grads(&ours, 1); // parameter 2 has no gradient
    opt.step().unwrap();
    let state = opt.state_dict().unwrap();
    let names: Vec<_> = state.iter().map(|(name, _)| name).collect();
    let groups =
        ["amsgrad", "betas.0", "betas.1", "decoupled_weight_decay", "eps", "lr", "maximize", "params", "weight_decay"];
    let expected: Vec<String> = groups.iter().map(|name| format!("param_groups.0.{name}")).collect();
    assert_eq!(names[..groups.len()], expected);
    assert_eq!(
        names[groups.len()..],
        [
            "state.0.exp_avg",
            "state.0.exp_avg_sq",
            "state.0.step",
            "state.1.exp_avg",
            "state.1.exp_avg_sq",
            "state.1.step"
        ]
    );
    assert_eq!(state.tensor("state.0.step", &[], Kind::Float).unwrap().double_value(&[]), 1.0);
    let average = state.tensor("state.1.exp_avg", &[2, 2], Kind::Double).unwrap();
    let before = average.copy();
    opt.step().unwrap();
    assert!(!average.equal(&before), "the tensor is the optimizer's own");
}

#[test]
fn an_assigned_state_is_kept_where_all_of_it_fits_and_copied_elsewhere() {
    let address = |state: &StateDict, entry: &str| match state.get(&format!("state.{entry}")).unwrap() {
        Entry::Tensor(tensor) => tensor.data_ptr(),
        _ => panic!("{entry} is a tensor"),
    };
    let ours = params(3);
    let mut opt = AdamW::builder(&ours).lr(0.5).build().unwrap();
    train(&mut opt, &ours, 1..3);
    let moments = ["0.exp_avg", "0.exp_avg_sq", "1.exp_avg", "1.exp_avg_sq", "2.exp_avg", "2.exp_avg_sq"];
    let addresses = |state: &StateDict| moments.map(|entry| address(state, entry));
    let saved = || copied(&opt.state_dict().unwrap());
    let mut resumed = AdamW::builder(params(3)).lr(0.5).build().unwrap();

    let state = saved();
    let theirs = addresses(&state);
    resumed.load_state_dict(&state).unwrap();
    assert!(addresses(&resumed.state_dict().unwrap()).iter().zip(&theirs).all(|(own, other)| own != other));
    resumed.assign_state_dict(state).unwrap();
    assert_eq!(addresses(&resumed.state_dict().unwrap()), theirs, "kept");

    // Two names for one tensor, views of one allocation, and other strides: nothing is kept.
    let mut tied = saved();
    let Ok(Entry::Tensor(first)) = tied.get("state.0.exp_avg") else { panic!("a tensor") };
    let first = first.shallow_clone();
    tied.insert("state.0.exp_avg_sq", Entry::Tensor(first));
    let mut strided = saved();
    let Ok(Entry::Tensor(matrix)) = strided.get("state.1.exp_avg") else { panic!("a tensor") };
    let matrix = matrix.tr().contiguous().tr();
    strided.insert("state.1.exp_avg", Entry::Tensor(matrix));
    let mut views = saved();
    let flat = Tensor::rand([8], (Kind::Double, tch::Device::Cpu));
    views.insert("state.1.exp_avg", Entry::Tensor(flat.narrow(0, 0, 4).view([2, 2])));
    views.insert("state.1.exp_avg_sq", Entry::Tensor(flat.narrow(0, 2, 4).view([2, 2])));
    for state in [tied, views, strided] {
        let (values, theirs) = (copied(&state), addresses(&state));
        resumed.assign_state_dict(state).unwrap();
        assert_same(&resumed.state_dict().unwrap(), &values, "copied");
        assert!(addresses(&resumed.state_dict().unwrap()).iter().zip(&theirs).all(|(own, other)| own != other));
    }

    let mut other = saved();
    other.insert("state.1.exp_avg", Entry::Tensor(Tensor::zeros([3], (Kind::Double, tch::Device::Cpu))));
    let before = addresses(&resumed.state_dict().unwrap());
    resumed.assign_state_dict(other).unwrap_err();
    assert_eq!(addresses(&resumed.state_dict().unwrap()), before, "a state that does not fit changes nothing");
}

#[test]
fn each_optimizers_state_has_pytorchs_names() {
    let expected: [(&str, &[&str]); 6] = [
        ("Adadelta", &["acc_delta", "square_avg", "step"]),
        ("Adamax", &["exp_avg", "exp_inf", "step"]),
        ("ASGD", &["ax", "eta", "mu", "step"]),
        ("NAdam", &["exp_avg", "exp_avg_sq", "mu_product", "step"]),
        ("RAdam", &["exp_avg", "exp_avg_sq", "step"]),
        ("Rprop", &["prev", "step", "step_size"]),
    ];
    for (optimizer, names) in expected {
        let (_, make) = ALL.iter().find(|(name, _)| *name == optimizer).unwrap();
        let ours = params(1);
        let mut opt = make(&ours);
        train(&mut *opt, &ours, 0..2);
        let state = opt.state_dict().unwrap();
        let found: Vec<_> = state.iter().filter_map(|(name, _)| name.strip_prefix("state.0.")).collect();
        assert_eq!(found, names, "{optimizer}");
        for scalar in ["eta", "mu", "mu_product"].iter().filter(|name| names.contains(name)) {
            assert!(state.tensor(&format!("state.0.{scalar}"), &[], Kind::Float).is_ok(), "{optimizer}: {scalar}");
        }
    }
}

#[test]
fn a_state_that_does_not_fit_changes_nothing() {
    let ours = params(2);
    let mut opt = AdamW::builder(&ours).lr(0.5).build().unwrap();
    train(&mut opt, &ours, 0..3);
    let good = copied(&opt.state_dict().unwrap());
    let broken = |change: &dyn Fn(&mut StateDict)| {
        let mut state = copied(&good);
        change(&mut state);
        state
    };
    let without = |key: &str| {
        let mut state = StateDict::new();
        for (name, entry) in copied(&good).iter().filter(|(name, _)| *name != key) {
            match entry {
                Entry::Tensor(tensor) => state.insert(name, Entry::Tensor(tensor.shallow_clone())),
                Entry::Float(value) => state.insert(name, Entry::Float(*value)),
                Entry::Bool(value) => state.insert(name, Entry::Bool(*value)),
                Entry::Int(value) => state.insert(name, Entry::Int(*value)),
                Entry::Text(value) => state.insert(name, Entry::Text(value.clone())),
            }
        }
        state
    };
    let float = Tensor::zeros([2, 2], (Kind::Float, crate::CPU));
    let cases = [
        (broken(&|s| s.insert("state.1.exp_avg", Entry::Tensor(float.shallow_clone()))), "state.1.exp_avg"),
        (broken(&|s| s.insert("state.1.step", Entry::Float(1.0))), "state.1.step"),
        (broken(&|s| s.insert("state.2.step", Entry::Float(1.0))), "state.2.step"),
        (broken(&|s| s.insert("param_groups.0.params", Entry::Int(3))), "param_groups.0.params"),
        (broken(&|s| s.insert("param_groups.0.lr", Entry::Float(f64::NAN))), "param_groups.0.lr"),
        (broken(&|s| s.insert("param_groups.0.amsgrad", Entry::Bool(true))), "state.0.max_exp_avg_sq"),
        (broken(&|s| s.insert("param_groups.1.lr", Entry::Float(1.0))), "param_groups.1.lr"),
        (without("param_groups.0.eps"), "param_groups.0.eps"),
        (without("state.1.exp_avg_sq"), "state.1.exp_avg_sq"),
    ];
    for (state, key) in cases {
        match opt.load_state_dict(&state).unwrap_err() {
            StateError::Missing { key: named } | StateError::Unexpected { key: named } => assert_eq!(named, key),
            StateError::Mismatch { key: named, .. } => assert_eq!(named, key),
            other => panic!("{key}: {other}"),
        }
        assert_same(&opt.state_dict().unwrap(), &good, key);
    }
    // Its own state can always be loaded, although it shares the tensors.
    let own = opt.state_dict().unwrap();
    opt.load_state_dict(&own).unwrap();
    assert_same(&opt.state_dict().unwrap(), &good, "own");
}

#[test]
fn options_come_from_the_state_and_decide_which_slots_there_are() {
    let ours = params(2);
    let mut saved = Adam::builder(&ours).lr(0.5).betas(0.1, 0.2).amsgrad(true).build().unwrap();
    train(&mut saved, &ours, 0..2);
    let mut other = Adam::builder(&ours).build().unwrap();
    train(&mut other, &ours, 0..2);
    other.load_state_dict(&saved.state_dict().unwrap()).unwrap();
    assert_eq!((other.lr(0), other.momentum(0)), (Some(0.5), Some(0.1)));
    assert_same(&other.state_dict().unwrap(), &saved.state_dict().unwrap(), "amsgrad");
    let mut muon = Muon::builder(&ours).build().unwrap();
    let mut state = muon.state_dict().unwrap();
    state.insert("param_groups.0.adjust_lr_fn", Entry::Text("elsewise".to_owned()));
    let said = muon.load_state_dict(&state).unwrap_err().to_string();
    assert!(said.contains("adjust_lr_fn") && said.contains("match_rms_adamw") && said.contains("elsewise"), "{said}");
}

#[test]
fn master_copies_are_saved() {
    let bfloat16 = || vec![Tensor::ones([64], (Kind::BFloat16, crate::CPU)).set_requires_grad(true)];
    let (first, second) = (bfloat16(), bfloat16());
    let make =
        |params: &[Tensor]| AdamW::builder(params).lr(1e-3).low_precision(LowPrecision::MasterCopy).build().unwrap();
    let (mut unbroken, mut resumed) = (make(&first), make(&second));
    let train = |opt: &mut dyn Trained, params: &[Tensor], steps: std::ops::Range<i64>| {
        for step in steps {
            (params[0].to_kind(Kind::Float) * (step + 1) as f64).square().sum(Kind::Float).backward();
            opt.step().unwrap();
            opt.zero_grad().unwrap();
        }
    };
    train(&mut unbroken, &first, 0..3);
    let state = copied(&unbroken.state_dict().unwrap());
    assert!(state.tensor("state.0.master_param", &[64], Kind::Float).is_ok());
    tch::no_grad(|| second[0].shallow_clone().copy_(&first[0]));
    resumed.load_state_dict(&state).unwrap();
    train(&mut unbroken, &first, 3..40);
    train(&mut resumed, &second, 3..40);
    assert!(first[0].equal(&second[0]), "{} {}", first[0], second[0]);
    assert!(first[0].double_value(&[0]) < 0.99, "{}", first[0]);
    assert_same(&unbroken.state_dict().unwrap(), &resumed.state_dict().unwrap(), "master");
}

/// Step counts are incremented before the kernel reads them, so an error has to undo that.
#[test]
fn a_step_that_fails_is_not_counted() {
    let (failing, plain) = (params(3), params(3));
    let make = |params: &[Tensor]| AdamW::builder(params).lr(0.1).build().unwrap();
    let (mut failing_opt, mut plain_opt) = (make(&failing), make(&plain));
    train(&mut failing_opt, &failing, 0..2);
    train(&mut plain_opt, &plain, 0..2);
    // The model is cast to another dtype, which its optimizer does not know.
    let was: Vec<_> = failing.iter().map(Tensor::data).collect();
    for param in &failing {
        param.shallow_clone().set_data(&param.data().to_kind(Kind::Float));
        param.square().sum(Kind::Float).backward();
    }
    assert!(failing_opt.step().is_err());
    assert!(failing_opt.step().is_err());
    failing_opt.zero_grad().unwrap();
    for (param, was) in failing.iter().zip(&was) {
        param.shallow_clone().set_data(was);
    }
    assert_same(&failing_opt.state_dict().unwrap(), &plain_opt.state_dict().unwrap(), "after two failed steps");
    train(&mut failing_opt, &failing, 2..4);
    train(&mut plain_opt, &plain, 2..4);
    for (failing, plain) in failing.iter().zip(&plain) {
        assert!(failing.equal(plain));
    }
}

#[test]
fn invalid_step_counts_are_refused() {
    let params = params(2);
    let mut opt = AdamW::builder(&params).lr(0.1).build().unwrap();
    train(&mut opt, &params, 0..2);
    for bad in [f32::NAN, f32::INFINITY, -3.0] {
        let mut state = opt.state_dict().unwrap();
        state.insert("state.0.step", Entry::Tensor(Tensor::from(bad)));
        let error = opt.load_state_dict(&state).unwrap_err().to_string();
        assert_eq!(error, format!("`state.0.step` should be a number of steps, finite and at least 0, but is {bad}"));
    }
}

#[test]
fn an_optimizer_in_backward_has_the_same_state_as_the_plain_one() {
    let (one, other) = (params(3), params(3));
    let mut inside: InBackward<_> = AdamW::builder(&one).build_in_backward().unwrap();
    let mut outside = AdamW::builder(&other).build().unwrap();
    train(&mut inside, &one, 0..3);
    train(&mut outside, &other, 0..3);
    assert_same(&inside.state_dict().unwrap(), &outside.state_dict().unwrap(), "in backward");
    outside.load_state_dict(&inside.state_dict().unwrap()).unwrap();
}

#[test]
fn adam_and_adamw_refuse_each_others_states() {
    let weight = Tensor::ones([3], (Kind::Float, CPU)).set_requires_grad(true);
    let mut adam = Adam::builder([&weight]).build().unwrap();
    let mut adamw = AdamW::builder([&weight]).build().unwrap();
    for error in [
        adam.load_state_dict(&adamw.state_dict().unwrap()).unwrap_err(),
        adamw.load_state_dict(&adam.state_dict().unwrap()).unwrap_err(),
    ] {
        assert!(error.to_string().contains("decoupled_weight_decay"), "{error}");
    }
    adamw.load_state_dict(&AdamW::builder([&weight]).build().unwrap().state_dict().unwrap()).unwrap();
}
