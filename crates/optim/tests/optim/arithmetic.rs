//! Fused and foreach steps compared with the formulas of their papers.

use overdrive_core::Optimizer;
use overdrive_optim::{Adadelta, AdamW, Adamax, Lion, RAdam, RmsProp, Rprop, Sgd};
use tch::{Kind, Tensor};

use crate::{CPU, assert_close, params, set_grads};

#[test]
fn adamw_follows_its_papers_formula_when_some_parameters_lack_gradients() {
    let (lr, beta1, beta2, eps, decay) = (0.01f64, 0.8f64, 0.95f64, 1e-6f64, 0.1f64);
    for amsgrad in [false, true] {
        let ours = params(4);
        let mut opt = AdamW::builder(&ours);
        opt = opt.lr(lr).betas(beta1, beta2).eps(eps).weight_decay(decay).amsgrad(amsgrad);
        let mut opt = opt.build().unwrap();
        let mut expected: Vec<_> = params(4).iter().map(Tensor::detach).collect();
        let mut moments: Vec<_> =
            expected.iter().map(|p| (p.zeros_like(), p.zeros_like(), p.zeros_like(), 0)).collect();
        for step in 0..6 {
            set_grads(&ours, step);
            for ((param, grad), (m, v, v_max, t)) in
                expected.iter_mut().zip(ours.iter().map(Tensor::grad)).zip(&mut moments)
            {
                if !grad.defined() {
                    continue;
                }
                *t += 1;
                *m = &*m * beta1 + &grad * (1.0 - beta1);
                *v = &*v * beta2 + grad.square() * (1.0 - beta2);
                *v_max = v_max.maximum(v);
                let second = if amsgrad { &*v_max } else { &*v };
                let denominator = second.sqrt() / (1.0 - beta2.powi(*t)).sqrt() + eps;
                *param = &*param * (1.0 - lr * decay) - &*m * (lr / (1.0 - beta1.powi(*t))) / denominator;
            }
            opt.step().unwrap();
            opt.zero_grad().unwrap();
            for (index, (ours, expected)) in ours.iter().zip(&expected).enumerate() {
                assert_close(ours, expected, &format!("amsgrad {amsgrad}, step {step}, parameter {index}"));
            }
        }
    }
}

#[test]
fn sgd_starts_each_momentum_at_its_own_first_gradient() {
    let (lr, momentum, dampening, decay) = (0.1, 0.9, 0.3, 0.01);
    let ours = params(4);
    let mut opt = Sgd::builder(&ours);
    opt = opt.lr(lr).momentum(momentum).dampening(dampening).weight_decay(decay);
    let mut opt = opt.build().unwrap();
    let mut expected: Vec<_> = params(4).iter().map(Tensor::detach).collect();
    let mut buffers: Vec<Option<Tensor>> = expected.iter().map(|_| None).collect();
    for step in 1..7 {
        set_grads(&ours, step);
        for ((param, grad), buffer) in expected.iter_mut().zip(ours.iter().map(Tensor::grad)).zip(&mut buffers) {
            if !grad.defined() {
                continue;
            }
            let grad = grad + &*param * decay;
            let next = match buffer.take() {
                Some(buffer) => buffer * momentum + grad * (1.0 - dampening),
                None => grad.copy(),
            };
            *param = &*param - &next * lr;
            *buffer = Some(next);
        }
        opt.step().unwrap();
        opt.zero_grad().unwrap();
        for (index, (ours, expected)) in ours.iter().zip(&expected).enumerate() {
            assert_close(ours, expected, &format!("step {step}, parameter {index}"));
        }
    }
}

#[test]
fn the_forms_of_an_optimizer_differ_only_by_rounding() {
    for amsgrad in [false, true] {
        let build = |params: &[Tensor]| AdamW::builder(params).lr(0.01).weight_decay(0.1).amsgrad(amsgrad);
        let all = [params(4), params(4), params(4), params(4)];
        let mut opts: [Box<dyn Optimizer>; 4] = [
            Box::new(build(&all[0]).build().unwrap()),
            Box::new(build(&all[1]).foreach(true).build().unwrap()),
            Box::new(build(&all[2]).foreach(true).capturable(true).build().unwrap()),
            Box::new(build(&all[3]).build_in_backward().unwrap()),
        ];
        assert_eq!(opts.each_ref().map(|opt| opt.takes_grad_scale()), [true, false, false, false]);
        for step in 0..8 {
            for (opt, params) in opts.iter_mut().zip(&all) {
                set_grads(params, step);
                opt.step().unwrap();
                opt.zero_grad().unwrap();
            }
            for other in &all[1..] {
                for (one, other) in all[0].iter().zip(other) {
                    // Step counts are float32, and so are the capturable form's bias corrections.
                    assert!(other.allclose(one, 1e-5, 1e-7, false), "amsgrad {amsgrad}, step {step}");
                }
            }
        }
        for other in [&all[1], &all[3]] {
            all[0].iter().zip(other).for_each(|(one, other)| assert_close(other, one, "no float32 corrections"));
        }
    }
}

/// The foreach form steps a large tensor in pieces; the result must be the same.
#[test]
fn a_large_tensor_is_stepped_like_its_parts() {
    // More than two pieces, and not a multiple of the piece size.
    let start = Tensor::randn([3, 300_001], (Kind::Float, CPU));
    type Build = fn(&[Tensor]) -> Box<dyn Optimizer>;
    let builders: [Build; 8] = [
        |params| Box::new(AdamW::builder(params).lr(0.1).amsgrad(true).foreach(true).build().unwrap()),
        |params| Box::new(Sgd::builder(params).lr(0.1).momentum(0.9).weight_decay(0.1).foreach(true).build().unwrap()),
        |params| Box::new(RmsProp::builder(params).lr(0.1).centered(true).momentum(0.5).build().unwrap()),
        |params| Box::new(Lion::builder(params).lr(0.1).build().unwrap()),
        |params| Box::new(Adadelta::builder(params).weight_decay(0.1).build().unwrap()),
        |params| Box::new(Adamax::builder(params).lr(0.1).build().unwrap()),
        |params| Box::new(RAdam::builder(params).lr(0.1).betas(0.9, 0.9).build().unwrap()),
        |params| Box::new(Rprop::builder(params).lr(0.1).build().unwrap()),
    ];
    for build in builders {
        let whole = [start.copy().set_requires_grad(true)];
        let parts: Vec<_> =
            start.view(-1).split(200_000, 0).iter().map(|part| part.copy().set_requires_grad(true)).collect();
        let mut opts = [build(&whole), build(&parts)];
        for step in 0..3 {
            for param in whole.iter().chain(&parts) {
                (param * (param.detach() * 3.0 + step).sin()).sum(Kind::Float).backward();
            }
            opts.iter_mut().for_each(|opt| {
                opt.step().unwrap();
                opt.zero_grad().unwrap();
            });
        }
        assert!(whole[0].view(-1).equal(&Tensor::cat(&parts, 0)), "{:?}", opts[0].lr(0));
        assert!(!whole[0].equal(&start));
    }
}
