//! Moment averages with one byte per parameter.

use overdrive_core::{Entry, Optimizer, OptimizerError, Stateful};
use overdrive_optim::{AdamW, AdamW8Bit, LowPrecision};
use tch::{Kind, Tensor};

use crate::CPU;
use crate::state::{assert_same, copied};

fn numbers(shape: &[i64]) -> Tensor {
    let n: i64 = shape.iter().product();
    ((Tensor::arange(n, (Kind::Float, CPU)) * 1.7).sin() * 0.1).reshape(shape).set_requires_grad(true)
}

/// The bytes of the state's tensors, per parameter.
fn bytes_per_parameter(opt: &(impl Optimizer + Stateful)) -> f64 {
    let state = opt.state_dict().unwrap();
    let bytes = |entry: &Entry| match entry {
        Entry::Tensor(tensor) => tensor.numel() * tensor.kind().elt_size_in_bytes(),
        _ => 0,
    };
    let total: usize = state.iter().map(|(_, entry)| bytes(entry)).sum();
    total as f64 / opt.params().iter().map(Tensor::numel).sum::<usize>() as f64
}

#[test]
fn the_state_takes_two_bytes_per_parameter_plus_the_scales() {
    // A layer of ResNet-50 and one of GPT-2, with their gains and biases.
    let shapes: [&[i64]; 6] = [&[512, 512, 3, 3], &[512], &[512], &[2304, 768], &[2304], &[768]];
    let params = shapes.map(numbers);
    let step = |opt: &mut dyn Optimizer| {
        params.iter().map(|param| param.square().sum(Kind::Float)).reduce(|sum, it| sum + it).unwrap().backward();
        opt.step().unwrap();
        opt.zero_grad().unwrap();
    };
    let mut eight = AdamW8Bit::builder(&params).build().unwrap();
    let mut full = AdamW::builder(&params).build().unwrap();
    step(&mut eight);
    step(&mut full);
    let (eight, full) = (bytes_per_parameter(&eight), bytes_per_parameter(&full));
    assert!(eight < 2.1 && full > 8.0, "{eight} {full}");
}

/// Both learn the same regression from the same start; rounding the averages must not change the final loss much.
#[test]
fn it_learns_as_well_as_the_float32_optimizer() {
    let inputs = (Tensor::arange(64 * 512, (Kind::Float, CPU)) * 0.13).sin().reshape([512, 64]);
    let wanted = inputs.matmul(&(Tensor::arange(64 * 64, (Kind::Float, CPU)) * 0.71).cos().reshape([64, 64]));
    let learned = |make: &dyn Fn(&Tensor) -> Box<dyn Optimizer>| {
        let weight = numbers(&[64, 64]);
        let mut opt = make(&weight);
        let mut losses = Vec::new();
        for step in 0..600 {
            opt.set_lr(0, 0.02 * (1.0 - f64::from(step) / 600.0)).unwrap();
            let loss = (inputs.matmul(&weight) - &wanted).square().mean(Kind::Float);
            losses.push(loss.double_value(&[]));
            loss.backward();
            opt.step().unwrap();
            opt.zero_grad().unwrap();
        }
        (losses[0], losses[599])
    };
    let plain = |weight: &Tensor| -> Box<dyn Optimizer> {
        Box::new(AdamW::builder([weight.shallow_clone()]).weight_decay(0.0).build().unwrap())
    };
    let eight = |weight: &Tensor| -> Box<dyn Optimizer> {
        Box::new(AdamW8Bit::builder([weight.shallow_clone()]).weight_decay(0.0).build().unwrap())
    };
    let ((start, full), (_, eight)) = (learned(&plain), learned(&eight));
    assert!(full < start / 100.0, "{start} {full}");
    assert!(eight < start / 100.0 && eight < 2.0 * full + 1e-4 * start, "{start} {full} {eight}");
}

#[test]
fn it_takes_bfloat16_and_refuses_float64() {
    let low = numbers(&[64, 64]).detach().to_kind(Kind::BFloat16).set_requires_grad(true);
    for precision in [LowPrecision::Nearest, LowPrecision::StochasticRounding, LowPrecision::MasterCopy] {
        let mut opt = AdamW8Bit::builder([low.shallow_clone()]).low_precision(precision).build().unwrap();
        let before = low.detach().copy();
        low.square().sum(Kind::BFloat16).backward();
        opt.step().unwrap();
        opt.zero_grad().unwrap();
        assert!(!low.equal(&before) && low.isfinite().all().int64_value(&[]) == 1, "{precision:?}");
    }
    let double = Tensor::zeros([64, 64], (Kind::Double, CPU)).set_requires_grad(true);
    let refused = AdamW8Bit::builder([double.shallow_clone()]).build().unwrap_err();
    assert!(
        matches!(&refused, OptimizerError::InvalidParameter { parameter, .. } if parameter == "number 0"),
        "{refused}"
    );
    AdamW8Bit::builder([double]).min_8bit_size(1 << 20).build().unwrap();
}

#[test]
fn it_resumes_bit_for_bit_from_a_saved_state() {
    let params = || [numbers(&[65, 70]), numbers(&[7])];
    let (first, second) = (params(), params());
    let make = |params: &[Tensor]| AdamW8Bit::builder(params).lr(0.01).build().unwrap();
    let (mut unbroken, mut resumed) = (make(&first), make(&second));
    let train = |opt: &mut AdamW8Bit, params: &[Tensor], steps: std::ops::Range<i64>| {
        for step in steps {
            params
                .iter()
                .map(|param| (param * step).sin().sum(Kind::Float))
                .reduce(|sum, it| sum + it)
                .unwrap()
                .backward();
            opt.step().unwrap();
            opt.zero_grad().unwrap();
        }
    };
    train(&mut unbroken, &first, 1..6);
    let state = copied(&unbroken.state_dict().unwrap());
    let names: Vec<_> = state.iter().map(|(name, _)| name).filter(|name| name.starts_with("state.")).collect();
    let kept = ["absmax1", "absmax2", "state1", "state2", "step"].map(|name| format!("state.0.{name}"));
    assert_eq!(names[..5], kept);
    assert_eq!(names[5..], ["state.1.exp_avg", "state.1.exp_avg_sq", "state.1.step"]);
    resumed.load_state_dict(&state).unwrap();
    tch::no_grad(|| first.iter().zip(&second).for_each(|(first, second)| second.shallow_clone().copy_(first)));
    train(&mut unbroken, &first, 6..12);
    train(&mut resumed, &second, 6..12);
    assert!(first.iter().zip(&second).all(|(first, second)| first.equal(second)));
    assert_same(&unbroken.state_dict().unwrap(), &resumed.state_dict().unwrap(), "8-bit");
}
