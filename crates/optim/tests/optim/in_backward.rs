//! Steps during the backward pass.

use overdrive_core::{Optimizer, OptimizerError, Stateful, TchOptimizer};
use overdrive_optim::{AdamW, Lamb, Lookahead, Sam, Sgd, clip_grad_norm_, clip_grad_value_};
use tch::nn::OptimizerConfig;
use tch::{Kind, Tensor, nn};

use crate::{CPU, DOUBLE, params};

/// A model in which the first parameter is used twice.
fn loss(params: &[Tensor]) -> Tensor {
    params.iter().chain(&params[..1]).map(|param| param.sin().sum(Kind::Double)).reduce(|sum, it| sum * it).unwrap()
}

#[test]
fn it_trains_as_the_plain_optimizer_and_frees_the_gradients() {
    let (inside, outside) = (params(5), params(5));
    let build = |params: &[Tensor]| {
        AdamW::builder(&params[..2]).lr(0.1).weight_decay(0.1).add_param_group(AdamW::group(&params[2..]).lr(0.01))
    };
    let mut inside_opt = build(&inside).build_in_backward().unwrap();
    let mut outside_opt = build(&outside).build().unwrap();
    assert_eq!((inside_opt.num_groups(), inside_opt.lr(1), inside_opt.params().len()), (2, Some(0.01), 5));
    for step in 0..6 {
        if step == 3 {
            inside_opt.set_lr(0, 0.2).unwrap();
            outside_opt.set_lr(0, 0.2).unwrap();
        }
        loss(&inside).backward();
        assert!(
            inside.iter().all(|param| !param.grad().defined()),
            "each gradient is freed as soon as it has been \
                                                                     used"
        );
        loss(&outside).backward();
        inside_opt.step().unwrap();
        outside_opt.step().unwrap();
        inside_opt.zero_grad().unwrap();
        outside_opt.zero_grad().unwrap();
        for (inside, outside) in inside.iter().zip(&outside) {
            assert!(inside.equal(outside), "step {step}");
        }
    }
    drop(inside_opt);
    let before = inside[0].detach().copy();
    loss(&inside).backward();
    assert!(inside[0].grad().defined() && inside[0].equal(&before), "a dropped optimizer does not step");
    // Another optimizer can have the parameters now.
    let mut again = Sgd::builder(&inside).build_in_backward().unwrap();
    loss(&inside).backward();
    again.step().unwrap();
    assert!(!inside[0].equal(&before));
}

#[test]
fn parameters_that_cannot_be_stepped_in_backward_are_named() {
    let ours = params(2);
    let _first = Sgd::builder(&ours[1..]).build_in_backward().unwrap();
    let taken = Sgd::builder(&ours).build_in_backward().unwrap_err();
    assert!(matches!(&taken, OptimizerError::InvalidParameter { parameter, .. } if parameter == "number 1"), "{taken}");
    let frozen = Sgd::builder([Tensor::ones([2], DOUBLE)]).build_in_backward().unwrap_err();
    assert!(frozen.to_string().contains("requires a gradient"), "{frozen}");
    // A refused build removes its hooks.
    Sgd::builder(&ours[..1]).build_in_backward().unwrap();
}

#[test]
fn step_returns_an_error_of_the_backward_pass() {
    let ours = params(2);
    let mut opt = AdamW::builder(&ours).build_in_backward().unwrap();
    loss(&ours).backward();
    opt.step().unwrap();
    for param in &ours {
        param.shallow_clone().set_data(&param.data().to_kind(Kind::Float));
    }
    ours.iter().map(|param| param.sum(Kind::Float)).reduce(|sum, it| sum + it).unwrap().backward();
    assert!(matches!(opt.step(), Err(OptimizerError::Torch(_))));
    opt.step().unwrap();
}

#[test]
fn an_error_of_the_backward_pass_stays_until_another_state_is_loaded() {
    let ours = params(2);
    let mut opt = AdamW::builder(&ours).build_in_backward().unwrap();
    loss(&ours).backward();
    opt.step().unwrap();
    let state = opt.state_dict().unwrap().copied().unwrap();
    let fail = |_: &mut dyn Optimizer| {
        let data: Vec<Tensor> = ours.iter().map(|param| param.data().copy()).collect();
        ours.iter().for_each(|param| param.shallow_clone().set_data(&param.data().to_kind(Kind::Float)));
        ours.iter().map(|param| param.sum(Kind::Float)).reduce(|sum, it| sum + it).unwrap().backward();
        ours.iter().zip(&data).for_each(|(param, data)| param.shallow_clone().set_data(data));
    };
    fail(&mut opt);
    opt.params_changed().unwrap();
    opt.zero_grad().unwrap();
    assert!(matches!(opt.step(), Err(OptimizerError::Torch(_))), "it is not lost");
    fail(&mut opt);
    opt.load_state_dict(&state).unwrap();
    opt.zero_grad().unwrap();
    opt.step().unwrap();
    loss(&ours).backward();
    opt.step().unwrap();
}

#[test]
fn wrappers_that_act_before_the_step_are_refused() {
    let build = || Sgd::builder(params(1)).build_in_backward().unwrap();
    assert!(build().behavior().steps_in_backward);
    for refused in [Lookahead::new(build(), 2, 0.5).map(drop), Sam::new(build(), 0.05).map(drop)] {
        let refused = refused.unwrap_err();
        assert!(matches!(refused, OptimizerError::DoesNotFit { .. }), "{refused}");
    }
}

#[test]
fn a_group_added_later_is_stepped_in_backward_too() {
    let ours = params(3);
    let mut opt = Sgd::builder(&ours[..1]).lr(0.1).build_in_backward().unwrap();
    opt.add_param_group(Sgd::group(&ours[1..]).lr(0.2)).unwrap();
    let before: Vec<_> = ours.iter().map(|param| param.detach().copy()).collect();
    loss(&ours).backward();
    opt.step().unwrap();
    assert!(ours.iter().zip(&before).all(|(param, before)| !param.equal(before) && !param.grad().defined()));
    assert!(opt.add_param_group(Sgd::group(&ours[1..])).is_err());
    assert!(opt.add_param_group(Sgd::group([Tensor::ones([2], DOUBLE)])).is_err());
    assert_eq!((opt.num_groups(), opt.lr(1)), (2, Some(0.2)));
}

#[test]
fn gradients_that_are_used_up_in_backward_cannot_be_clipped() {
    let ours = params(3);
    let mut opt = Sgd::builder(&ours[..2]).build_in_backward().unwrap();
    opt.add_param_group(Sgd::group(&ours[2..])).unwrap();
    loss(&ours).backward();
    for refused in [clip_grad_norm_(&ours[2..], 1.0).map(drop), clip_grad_value_(&ours, 1.0)] {
        let refused = refused.unwrap_err();
        assert!(refused.to_string().contains("stepped in backward"), "{refused}");
    }
    drop(opt);
    loss(&ours).backward();
    clip_grad_norm_(&ours, 1.0).unwrap();
}

#[test]
fn a_group_added_later_that_needs_all_gradients_is_an_error() {
    let [one, other] = [(); 2].map(|()| Tensor::ones([3], DOUBLE).set_requires_grad(true));
    let mut opt = Lamb::builder([&one]).build_in_backward().unwrap();
    opt.add_param_group(Lamb::group([&other]).max_grad_norm(Some(0.1))).unwrap();
    (&one + &other).sum(Kind::Double).backward();
    let error = opt.step().unwrap_err().to_string();
    assert!(error.starts_with("max_grad_norm cannot be used"), "{error}");
    assert_eq!(other, Tensor::ones([3], DOUBLE));
}

#[test]
fn a_plain_optimizer_refuses_parameters_that_another_steps_in_backward() {
    let params = params(2);
    let mut plain = Sgd::builder([("weight", &params[0])]).build().unwrap();
    let in_backward = Sgd::builder(&params).build_in_backward().unwrap();
    let said = plain.step().unwrap_err().to_string();
    assert!(said.starts_with("parameter `weight`: another optimizer, made by `build_in_backward`"), "{said}");
    let vs = nn::VarStore::new(CPU);
    let weight = vs.root().ones("weight", &[2]);
    let mut tch = TchOptimizer::new(nn::Sgd::default().build(&vs, 0.1).unwrap());
    let of_tch = Sgd::builder([&weight]).build_in_backward().unwrap();
    let said = tch.step().unwrap_err().to_string();
    assert!(said.contains("made by `build_in_backward`"), "{said}");
    drop((in_backward, of_tch));
    plain.step().unwrap();
    tch.step().unwrap();
}
