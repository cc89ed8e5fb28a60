//! Which optimizers and `GradientSync`s an accumulator accepts or refuses.

use overdrive_accum::{Accumulator, Samples};
use overdrive_core::{AveragedBy, Behavior, GradientSync, SyncError};
use tch::{Kind, Tensor};

use crate::{CPU, Params};

/// A sync that reports this `averaged_by`, and this answer for `averages`.
struct By(AveragedBy, bool);

impl GradientSync for By {
    fn world_size(&self) -> usize {
        1
    }

    fn averaged_by(&self) -> AveragedBy {
        self.0
    }

    fn averages(&self, _parameter: &Tensor) -> bool {
        self.1
    }

    fn hold_back(&self, _hold: bool) -> Result<(), SyncError> {
        Ok(())
    }

    fn close_with_nothing(&self) -> Result<(), SyncError> {
        Ok(())
    }

    fn sum(&self, value: f64) -> Result<f64, SyncError> {
        Ok(value)
    }
}

#[test]
fn an_optimizer_that_steps_or_averages_at_another_time_is_refused() {
    let weight = Tensor::ones([1], (Kind::Float, CPU)).set_requires_grad(true);
    let plain = Behavior::default();
    let (mut in_backward, mut communicates) = (plain, plain);
    in_backward.steps_in_backward = true;
    communicates.communicates = true;
    let cases = [
        (in_backward, AveragedBy::Nobody, Some("it steps at each backward pass")),
        (in_backward, AveragedBy::Optimizer, Some("it steps at each backward pass")),
        (in_backward, AveragedBy::Backward, None),
        (communicates, AveragedBy::Nobody, Some("it averages over ranks in its steps")),
        (communicates, AveragedBy::Optimizer, None),
        (communicates, AveragedBy::Backward, None),
        (plain, AveragedBy::Optimizer, Some("it does not average over ranks")),
        (plain, AveragedBy::Nobody, None),
        (plain, AveragedBy::Backward, None),
    ];
    for (behavior, averaged_by, reason) in cases {
        let opt = Params { behavior, ..Params::new([&weight]) };
        let mut accum = Accumulator::new(2).unwrap().with_sync(By(averaged_by, true));
        let result = accum.backward(&opt, &weight.mean(Kind::Float), Samples(2), true);
        match (reason, result) {
            (None, Ok(_)) => {}
            (Some(reason), Err(error)) => {
                let expected = format!("Accumulator cannot be used with this optimizer: {reason}");
                assert!(error.to_string().starts_with(&expected), "{error}");
            }
            (reason, result) => panic!("{behavior:?}, {averaged_by:?}: {result:?} instead of {reason:?}"),
        }
    }
}

#[test]
fn a_parameter_that_is_not_averaged_over_ranks_is_refused_before_the_pass() {
    let weight = Tensor::ones([1], (Kind::Float, CPU)).set_requires_grad(true);
    let opt = Params::new([&weight]);
    let mut accum = Accumulator::new(2).unwrap().with_sync(By(AveragedBy::Backward, false));
    let error = accum.backward(&opt, &weight.mean(Kind::Float), Samples(2), true).unwrap_err();
    assert!(error.to_string().starts_with("parameter number 0: its gradient is not averaged"), "{error}");
    assert!(!weight.grad().defined());
    // An optimizer that steps in backward is checked at every pass, because it would step before the window closes.
    let mut behavior = Behavior::default();
    behavior.steps_in_backward = true;
    let in_backward = Params { behavior, ..Params::new([&weight]) };
    assert!(accum.backward(&in_backward, &weight.mean(Kind::Float), Samples(2), false).is_err());
    assert!(!weight.grad().defined());
    let _ = weight.set_requires_grad(false);
    let other = Tensor::ones([1], (Kind::Float, CPU)).set_requires_grad(true);
    assert!(
        accum.backward(&opt, &other.mean(Kind::Float), Samples(2), true).is_ok(),
        "a frozen parameter needs no average"
    );
}

/// A step inside the closing pass must see the large batch's gradients.
#[test]
fn an_optimizer_that_steps_in_backward_sees_the_large_batchs_gradients_in_the_closing_pass() {
    let weight = Tensor::ones([1], (Kind::Float, CPU)).set_requires_grad(true);
    let mut behavior = Behavior::default();
    behavior.steps_in_backward = true;
    let opt = Params { behavior, ..Params::new([&weight]) };
    let mut accum = Accumulator::new(4).unwrap().with_sync(By(AveragedBy::Backward, true));
    for window in [&[2, 2, 2, 2][..], &[2], &[3, 1], &[2, 0], &[0]] {
        for (micro, &count) in window.iter().enumerate() {
            let closes = micro + 1 == window.len();
            accum.backward(&opt, &(&weight * 3.0).mean(Kind::Float), Samples(count), closes).unwrap();
            if closes {
                let found = if weight.grad().defined() { weight.grad().double_value(&[0]) } else { 0.0 };
                let expected = if window.iter().sum::<i64>() > 0 { 3.0 } else { 0.0 };
                assert_eq!(found, expected, "{window:?}");
            }
        }
        weight.shallow_clone().zero_grad();
    }
}
