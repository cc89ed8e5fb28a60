//! bfloat16 parameters with updates smaller than their precision.

use overdrive_core::{GradScale, Optimizer, Stateful};
use overdrive_optim::{Adafactor, AdamW, Asgd, AveragedModel, Averaging, Lamb, LowPrecision, NAdam, Rprop, Sgd};
use tch::{Kind, Tensor};

use crate::CPU;

const N: i64 = 20_000;

fn ones(kind: Kind) -> Tensor {
    Tensor::ones([N], (kind, CPU)).set_requires_grad(true)
}

/// 100 steps of 1e-4 downwards, from 1: the next bfloat16 below 1 is 1 - 1/256.
fn descended(kind: Kind, precision: LowPrecision) -> Tensor {
    let param = ones(kind);
    let mut opt = Sgd::builder([param.shallow_clone()]).lr(1e-4).low_precision(precision).build().unwrap();
    for _ in 0..100 {
        param.sum(kind).backward();
        opt.step().unwrap();
        opt.zero_grad().unwrap();
    }
    assert_eq!(param.kind(), kind);
    param.detach().to_kind(Kind::Double)
}

#[test]
fn small_updates_are_lost_by_nearest_rounding_and_kept_by_the_other_forms() {
    let mean = |values: &Tensor| values.mean(Kind::Double).double_value(&[]);
    assert_eq!(mean(&descended(Kind::BFloat16, LowPrecision::Nearest)), 1.0);
    // 0.99 is between 253/256 and 254/256.
    assert_eq!(mean(&descended(Kind::BFloat16, LowPrecision::MasterCopy)), 253.0 / 256.0);
    tch::manual_seed(1);
    let by_chance = descended(Kind::BFloat16, LowPrecision::StochasticRounding);
    let error = mean(&by_chance) - 0.99;
    // One entry's standard deviation is at most that of the sum of 100 draws of 1/256 with probability 0.0256.
    let sigma = (100.0 * 0.0256f64).sqrt() / 256.0 / (N as f64).sqrt();
    assert!(error.abs() < 5.0 * sigma, "{error} {sigma}");
    assert!(by_chance.equal(&by_chance.to_kind(Kind::BFloat16).to_kind(Kind::Double)));
    // float32 needs neither.
    let plain = descended(Kind::Float, LowPrecision::Nearest);
    assert!(descended(Kind::Float, LowPrecision::StochasticRounding).equal(&plain));
    assert!(descended(Kind::Float, LowPrecision::MasterCopy).equal(&plain));
    // float16 has no stochastic rounding, but master copies work as for bfloat16.
    assert_eq!(mean(&descended(Kind::Half, LowPrecision::StochasticRounding)), 1.0);
    assert!((mean(&descended(Kind::Half, LowPrecision::MasterCopy)) - 0.99).abs() < 5e-4);
}

/// libtorch 2.11's fused SGD for these dtypes on a CPU leaves most weights as they were.
#[test]
fn sgd_moves_every_weight() {
    for kind in [Kind::BFloat16, Kind::Half] {
        for momentum in [0.0, 0.5] {
            let param = ones(kind);
            let builder = || Sgd::builder([param.shallow_clone()]).lr(0.25).momentum(momentum);
            let mut opt = builder().build().unwrap();
            param.sum(kind).backward();
            opt.step().unwrap();
            assert!(param.detach().equal(&Tensor::full([N], 0.75, (kind, CPU))), "{kind:?}, momentum {momentum}");
            let error = builder().fused(true).build().unwrap_err().to_string();
            assert!(error.contains("`fused(false)`"), "{error}");
            assert!(builder().fused(true).low_precision(LowPrecision::MasterCopy).build().is_ok());
            // Parameters that are converted when the optimizer is there.
            let mut late = ones(Kind::Float);
            let mut opt = Sgd::builder([late.shallow_clone()]).lr(0.25).build().unwrap();
            tch::no_grad(|| late.set_data(&late.detach().to_kind(kind)));
            late.sum(kind).backward();
            opt.step().unwrap();
            assert!(late.detach().equal(&Tensor::full([N], 0.75, (kind, CPU))), "{kind:?}");
            // A scale would need the fused kernel.
            let found_inf = Tensor::zeros([], (Kind::Float, CPU));
            let scale = GradScale { scale: None, found_inf: &found_inf };
            let error = opt.step_scaled(scale).unwrap_err().to_string();
            assert!(error.contains("after the optimizer was built"), "{error}");
        }
    }
}

#[test]
fn a_master_copy_equals_float32_training() {
    let (low, full) = (ones(Kind::BFloat16), ones(Kind::Float));
    let mut low_opt = AdamW::builder([low.shallow_clone()]).low_precision(LowPrecision::MasterCopy).build().unwrap();
    let mut full_opt = AdamW::builder([full.shallow_clone()]).build().unwrap();
    for step in 1..20 {
        // The same gradient for both, exact in bfloat16.
        let grad = (Tensor::arange(N, (Kind::Float, CPU)) * f64::from(step)).sin().to_kind(Kind::BFloat16);
        (&low * &grad).sum(Kind::BFloat16).backward();
        (&full * grad.to_kind(Kind::Float)).sum(Kind::Float).backward();
        for opt in [&mut low_opt, &mut full_opt] {
            opt.step().unwrap();
            opt.zero_grad().unwrap();
        }
    }
    let state = low_opt.state_dict().unwrap();
    assert!(state.tensor("state.0.master_param", &[N], Kind::Float).unwrap().equal(&full.detach()));
    assert!(low.detach().equal(&full.detach().to_kind(Kind::BFloat16)));
}

#[test]
fn infinity_and_nan_stay_what_they_are() {
    let param = Tensor::from_slice(&[f32::INFINITY, f32::NEG_INFINITY, f32::NAN, 0.0, 3.0])
        .to_kind(Kind::BFloat16)
        .set_requires_grad(true);
    let rounding = LowPrecision::StochasticRounding;
    let mut opt = Sgd::builder([param.shallow_clone()]).lr(0.0).low_precision(rounding).build().unwrap();
    param.sum(Kind::BFloat16).backward();
    opt.step().unwrap();
    let values: Vec<f64> = Vec::try_from(param.detach().to_kind(Kind::Double)).unwrap();
    assert!(values[0] == f64::INFINITY && values[1] == f64::NEG_INFINITY && values[2].is_nan(), "{values:?}");
    assert_eq!(values[3..], [0.0, 3.0], "numbers that are exact in bfloat16 are not rounded");
}

#[test]
fn every_kind_of_step_works_with_every_form() {
    for precision in [LowPrecision::Nearest, LowPrecision::StochasticRounding, LowPrecision::MasterCopy] {
        let param = || {
            let start = Tensor::arange(64, (Kind::Float, CPU)).reshape([8, 8]).sin();
            start.to_kind(Kind::BFloat16).set_requires_grad(true)
        };
        let params = [param(), param(), param(), param(), param(), param(), param()];
        let one = |index: usize| [params[index].shallow_clone()];
        let mut opts: [Box<dyn Optimizer>; 7] = [
            Box::new(AdamW::builder(one(0)).lr(0.1).low_precision(precision).build().unwrap()),
            Box::new(AdamW::builder(one(1)).lr(0.1).foreach(true).low_precision(precision).build().unwrap()),
            Box::new(Adafactor::builder(one(2)).lr(0.1).low_precision(precision).build().unwrap()),
            Box::new(Lamb::builder(one(3)).lr(0.1).low_precision(precision).build().unwrap()),
            Box::new(Asgd::builder(one(4)).lr(0.1).low_precision(precision).build().unwrap()),
            Box::new(NAdam::builder(one(5)).lr(0.1).low_precision(precision).build().unwrap()),
            Box::new(Rprop::builder(one(6)).lr(0.1).low_precision(precision).build().unwrap()),
        ];
        let before = params[0].square().sum(Kind::Float).double_value(&[]);
        for _ in 0..10 {
            for (param, opt) in params.iter().zip(&mut opts) {
                param.square().sum(Kind::BFloat16).backward();
                opt.step().unwrap();
                opt.zero_grad().unwrap();
            }
        }
        for (index, param) in params.iter().enumerate() {
            let after = param.square().sum(Kind::Float).double_value(&[]);
            assert!(after < 0.8 * before, "{precision:?}, {index}: {before} {after}");
        }
    }
}

#[test]
fn masters_take_over_written_elements_and_keep_the_precision_of_the_others() {
    let vs = tch::nn::VarStore::new(CPU);
    let mut weight = vs.root().ones("weight", &[2]);
    tch::no_grad(|| weight.set_data(&weight.detach().to_kind(Kind::BFloat16)));
    let mut opt = Sgd::builder(&vs).lr(1e-3).low_precision(LowPrecision::MasterCopy).build().unwrap();
    let mut ema = AveragedModel::new(&vs, Averaging::Ema { decay: 0.5 }).unwrap();
    ema.update().unwrap();
    let mut steps = |count: usize, ema: &mut AveragedModel| {
        for _ in 0..count {
            weight.sum(Kind::Float).backward();
            opt.step().unwrap();
            opt.zero_grad().unwrap();
            // An evaluation with the averages: afterwards the weights are the same as before.
            ema.apply(|| ()).unwrap();
        }
        Vec::<f32>::try_from(weight.detach().to_kind(Kind::Float)).unwrap()
    };
    // A hundred steps, each of which bfloat16 would round away.
    let near = |found: &[f32], expected: [f32; 2]| found.iter().zip(expected).all(|(a, b)| (a - b).abs() < 0.006);
    let found = steps(100, &mut ema);
    assert!(near(&found, [0.9, 0.9]), "{found:?}");
    // One weight is overwritten, without a call of `params_changed`.
    let _ = tch::no_grad(|| vs.variables()["weight"].get(0).fill_(0.5));
    let found = steps(50, &mut ema);
    assert!(near(&found, [0.45, 0.85]), "{found:?}");
}
