//! Schedule-free optimizers: their two modes; and Prodigy, whose steps depend on all parameters.

use overdrive_core::{Optimizer, OptimizerError, Stateful};
use overdrive_optim::{AdamWScheduleFree, LowPrecision, ParamGroup, Prodigy, ProdigyOptions, SgdScheduleFree};
use tch::{Kind, Tensor};

use crate::state::{assert_same, copied};
use crate::{CPU, DOUBLE, assert_close, params, set_grads};

fn train(opt: &mut dyn Optimizer, params: &[Tensor], steps: std::ops::Range<i64>) {
    for step in steps {
        set_grads(params, step);
        opt.step().unwrap();
        opt.zero_grad().unwrap();
    }
}

fn copies(params: &[Tensor]) -> Vec<Tensor> {
    params.iter().map(|param| param.detach().copy()).collect()
}

/// With a constant rate and no weight decay, the average is the mean of all points that SGD steps to.
#[test]
fn the_parameters_of_evaluation_mode_are_the_mean_of_the_points() {
    let weight = Tensor::ones([3], DOUBLE).set_requires_grad(true);
    let mut opt = SgdScheduleFree::builder([&weight]).lr(0.1).momentum(0.75).build().unwrap();
    let (mut z, mut points, mut mean) = (weight.detach().copy(), Vec::new(), weight.detach().copy());
    for _ in 0..7 {
        let y = &z * 0.25 + &mean * 0.75;
        assert_close(&weight, &y, "the parameters of training mode");
        weight.square().sum(Kind::Double).backward();
        opt.step().unwrap();
        opt.zero_grad().unwrap();
        z -= y * 2.0 * 0.1;
        points.push(z.copy());
        mean = Tensor::stack(&points, 0).mean_dim(0, false, Kind::Double);
        opt.eval().unwrap();
        assert_close(&weight, &mean, "the parameters of evaluation mode");
        opt.eval().unwrap();
        assert_close(&weight, &mean, "`eval` once more");
        opt.train().unwrap();
    }
}

#[test]
fn a_step_in_evaluation_mode_is_refused_and_changes_nothing() {
    let ours = params(4);
    let mut opt = AdamWScheduleFree::builder(&ours).build().unwrap();
    assert!(opt.is_training());
    train(&mut opt, &ours, 0..3);
    opt.eval().unwrap();
    let (before, state) = (copies(&ours), copied(&opt.state_dict().unwrap()));
    set_grads(&ours, 3);
    assert!(matches!(opt.step(), Err(OptimizerError::InEvaluation)) && !opt.is_training());
    assert!(ours.iter().zip(&before).all(|(now, before)| now.equal(before)));
    assert_same(&opt.state_dict().unwrap(), &state, "refused");
    opt.train().unwrap();
    opt.step().unwrap();
}

/// Saved in either mode; parameter 2 has no gradient on odd steps, and no state at first.
#[test]
fn a_run_resumes_exactly_from_either_mode() {
    for in_training in [true, false] {
        let first = params(4);
        let build = |params: &[Tensor]| AdamWScheduleFree::builder(params).lr(0.05).warmup_steps(4).build().unwrap();
        let mut unbroken = build(&first);
        train(&mut unbroken, &first, 1..4);
        if !in_training {
            unbroken.eval().unwrap();
        }
        let second: Vec<_> = copies(&first).into_iter().map(|it| it.set_requires_grad(true)).collect();
        let mut resumed = build(&second);
        resumed.load_state_dict(&copied(&unbroken.state_dict().unwrap())).unwrap();
        assert_eq!(resumed.is_training(), in_training);
        for (opt, params) in [(&mut unbroken, &first), (&mut resumed, &second)] {
            opt.train().unwrap();
            train(opt, params, 4..9);
            opt.eval().unwrap();
        }
        assert!(first.iter().zip(&second).all(|(one, other)| one.equal(other)));
    }
}

#[test]
fn averaging_restarts_at_weights_that_were_loaded() {
    let ours = params(2);
    let mut opt = SgdScheduleFree::builder(&ours).lr(0.01).build().unwrap();
    train(&mut opt, &ours, 0..5);
    assert!(opt.behavior().keeps_copies);
    tch::no_grad(|| ours.iter().for_each(|param| drop(param.shallow_clone().fill_(2.0))));
    opt.params_changed().unwrap();
    opt.eval().unwrap();
    assert_close(&ours[1], &ours[1].full_like(2.0), "the average of what was loaded");
}

#[test]
fn bfloat16_parameters_switch_by_their_float32_copies() {
    let bf16 = Tensor::ones([8], (Kind::BFloat16, CPU)).set_requires_grad(true);
    let single = Tensor::ones([8], (Kind::Float, CPU)).set_requires_grad(true);
    let masters = SgdScheduleFree::builder([&bf16]).lr(1e-3).low_precision(LowPrecision::MasterCopy).build();
    let (mut masters, mut exact) = (masters.unwrap(), SgdScheduleFree::builder([&single]).lr(1e-3).build().unwrap());
    for _ in 0..40 {
        for (opt, weight) in [(&mut masters, &bf16), (&mut exact, &single)] {
            opt.train().unwrap();
            weight.sum(Kind::Float).backward();
            opt.step().unwrap();
            opt.zero_grad().unwrap();
            opt.eval().unwrap();
        }
    }
    let trained = &masters.trained().unwrap()[0];
    assert!(trained.equal(&single), "{trained} {single}");
    assert!(bf16.equal(&single.to_kind(Kind::BFloat16)));
}

#[test]
fn a_group_added_later_takes_part_in_both_modes() {
    let ours = params(3);
    let mut opt = SgdScheduleFree::builder(&ours[..2]).lr(0.01).build().unwrap();
    train(&mut opt, &ours[..2], 0..2);
    opt.eval().unwrap();
    opt.add_param_group(SgdScheduleFree::group(&ours[2..])).unwrap();
    let before = ours[2].detach().copy();
    opt.train().unwrap();
    assert!(opt.is_training() && ours[2].equal(&before));
    train(&mut opt, &ours, 2..5);
    let moved = ours[2].detach().copy();
    opt.eval().unwrap();
    assert!(!ours[2].equal(&before) && !ours[2].equal(&moved));
}

#[test]
fn neither_steps_in_backward() {
    let ours = params(1);
    let refused = [
        SgdScheduleFree::builder(&ours).build_in_backward().unwrap_err().to_string(),
        Prodigy::builder(&ours).build_in_backward().unwrap_err().to_string(),
    ];
    for said in refused {
        assert!(said.starts_with("`build_in_backward` cannot be used with this optimizer"), "{said}");
    }
}

#[test]
fn prodigy_finds_a_step_size_that_all_groups_share() {
    let (one, other) = (params(3), params(3));
    let mut whole = Prodigy::builder(&one).build().unwrap();
    let mut split = Prodigy::builder(&other[..1]).add_param_group(Prodigy::group(&other[1..])).build().unwrap();
    assert_eq!(whole.d(), 1e-6);
    for (opt, params) in [(&mut whole, &one), (&mut split, &other)] {
        train(opt, params, 0..30);
    }
    assert!(whole.d() > 1e-4, "{}", whole.d());
    assert_eq!(whole.d(), split.d());
    assert!(one.iter().zip(&other).all(|(one, other)| one.equal(other)));
}

#[test]
fn a_prodigy_group_with_a_rate_of_0_stays_as_it_is() {
    let ours = params(2);
    let group = Prodigy::group(&ours[1..]).weight_decay(0.1);
    let mut opt = Prodigy::builder(&ours[..1]).add_param_group(group).build().unwrap();
    train(&mut opt, &ours, 0..3);
    opt.set_lr(1, 0.0).unwrap();
    let before = copies(&ours);
    train(&mut opt, &ours, 3..6);
    assert!(!ours[0].equal(&before[0]) && ours[1].equal(&before[1]));
    opt.set_lr(1, 0.5).unwrap();
    set_grads(&ours, 6);
    let said = opt.step().unwrap_err().to_string();
    assert!(said.starts_with("lr is 0.5, but should be the same in all groups"), "{said}");
}

#[test]
fn prodigy_leaves_everything_without_a_gradient() {
    let ours = params(2);
    let mut opt = Prodigy::builder(&ours).build().unwrap();
    train(&mut opt, &ours, 0..2);
    let state = copied(&opt.state_dict().unwrap());
    opt.step().unwrap();
    assert_same(&opt.state_dict().unwrap(), &state, "no gradient");
}

/// As in prodigyopt, which measures `d` over all groups with the first one's options.
#[test]
fn prodigys_groups_share_the_first_ones_options() {
    let run = |second: fn(ParamGroup<ProdigyOptions>) -> ParamGroup<ProdigyOptions>| {
        let [p, q] = [1.0, 2.0].map(|value| (Tensor::ones([2], DOUBLE) * value).set_requires_grad(true));
        let builder = Prodigy::builder([&p]).betas(0.9, 0.99).weight_decay(0.1).d0(1e-2);
        let mut opt = builder.add_param_group(second(Prodigy::group([&q]))).build().unwrap();
        for _ in 0..20 {
            ((&p - 3.0).square() + (&q + 1.0).square()).sum(Kind::Double).backward();
            opt.step()?;
            opt.zero_grad()?;
        }
        Ok::<_, OptimizerError>((opt.d(), p.sum(Kind::Double).double_value(&[]), q.sum(Kind::Double).double_value(&[])))
    };
    let same = run(|group| group).unwrap();
    assert_eq!(run(|group| group.betas(0.1, 0.5)).unwrap(), same);
    assert_eq!(run(|group| group.decouple(false)).unwrap(), same);
    let error = run(|group| group.betas(0.0, 0.99)).unwrap_err().to_string();
    assert_eq!(error, "beta1 is 0, but should be 0 in all groups or in none");
}

#[test]
fn prodigys_slices_cannot_change_while_it_trains() {
    let p = Tensor::ones([5], DOUBLE).set_requires_grad(true);
    let mut opt = Prodigy::builder([&p]).build().unwrap();
    let step = |opt: &mut dyn Optimizer| {
        (&p - 3.0).square().sum(Kind::Double).backward();
        opt.step().unwrap();
        opt.zero_grad().unwrap();
    };
    step(&mut opt);
    let changed = opt.group_mut(0).unwrap().slice_p(3).apply();
    assert!(matches!(changed, Err(OptimizerError::OtherState)), "{changed:?}");
    step(&mut opt);
}
