//! What a scaler asks of its optimizers, and what it reports to them.

use overdrive_amp::{AmpError, GradScaler};
use overdrive_core::{Behavior, OptimizerError};
use tch::Device;

use crate::{CPU, Counting, backward, param};

#[test]
fn an_optimizer_whose_steps_cannot_be_skipped_is_neither_unscaled_nor_stepped() {
    let mut in_backward = Behavior::default();
    in_backward.steps_in_backward = true;
    let mut over_ranks = Behavior::default();
    over_ranks.communicates = true;
    for (behavior, reason) in [(in_backward, "it steps during"), (over_ranks, "it averages over ranks")] {
        for make in [Counting::new, Counting::fused] {
            let mut opt = Counting { behavior, ..make(vec![param()]) };
            let mut scaler = GradScaler::builder(CPU).init_scale(4.0).build().unwrap();
            backward(&mut scaler, &opt.params[0], 3.0);
            let scaled = opt.params[0].grad().copy();
            for refused in [scaler.unscale_(&mut opt), scaler.step(&mut opt).map(drop)] {
                let why = refused.unwrap_err();
                assert!(matches!(why, AmpError::Optimizer(OptimizerError::DoesNotFit { .. })), "{why}");
                let expected = format!("GradScaler cannot be used with this optimizer: {reason}");
                assert!(why.to_string().starts_with(&expected), "{why}");
            }
            assert_eq!((opt.steps, opt.fused.map_or(0, |seen| seen.len())), (0, 0));
            assert_eq!(opt.params[0].grad(), scaled);
            // A disabled scaler takes any optimizer.
            let mut opt = Counting { behavior, ..make(vec![param()]) };
            GradScaler::builder(CPU).enabled(false).build().unwrap().step(&mut opt).unwrap();
            assert_eq!(opt.steps, 1);
        }
    }
}

#[test]
fn step_skipped_is_called_for_a_skipped_step() {
    let mut opt = Counting::new(vec![param()]);
    let mut scaler = GradScaler::builder(CPU).init_scale(4.0).build().unwrap();
    backward(&mut scaler, &opt.params[0], f64::INFINITY);
    assert!(scaler.step(&mut opt).unwrap().skipped().unwrap());
    assert_eq!((opt.steps, opt.skipped), (0, 1));
}

#[test]
fn a_scaler_for_a_missing_gpu_disables_itself() {
    let missing = Device::Cuda(tch::Cuda::device_count() as usize);
    assert!(!GradScaler::new(missing).is_enabled());
    assert!(!GradScaler::builder(missing).build().unwrap().is_enabled());
    assert!(GradScaler::new(CPU).is_enabled());
}

/// Like SAM, which runs backward twice per step: its second gradients are scaled like the first.
#[test]
fn gradients_after_a_sam_ascent_are_unscaled_again_and_an_infinity_before_it_counts() {
    for make in [Counting::new, Counting::fused] {
        for (first, second) in [(3.0, 5.0), (f64::INFINITY, 5.0), (3.0, f64::NAN)] {
            let mut opt = make(vec![param()]);
            let mut scaler = GradScaler::builder(CPU).init_scale(4.0).build().unwrap();
            backward(&mut scaler, &opt.params[0], first);
            scaler.unscale_(&mut opt).unwrap();
            assert!(matches!(scaler.unscale_(&mut opt), Err(AmpError::AlreadyUnscaled)), "the same gradients");
            opt.params[0].zero_grad();
            opt.gradients_used += 1;
            backward(&mut scaler, &opt.params[0], second);
            scaler.unscale_(&mut opt).unwrap();
            let unscaled = opt.params[0].grad().double_value(&[0]);
            assert!(unscaled == second || second.is_nan(), "{unscaled} instead of {second}");
            let skipped = scaler.step(&mut opt).unwrap().skipped().unwrap();
            assert_eq!(skipped, !(first + second).is_finite(), "{first}, then {second}");
            scaler.update().unwrap();
            assert_eq!(scaler.scale_value().unwrap(), if skipped { 2.0 } else { 4.0 });
        }
    }
}
