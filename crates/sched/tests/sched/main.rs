//! Schedules step by step, bad input, early stopping, and (with the feature `torch`) schedules attached to an
//! optimizer.

mod bad_input;
mod metrics;
mod pictures;
mod values;

#[cfg(feature = "torch")]
mod attached;
#[cfg(feature = "torch")]
mod lr_finder;
#[cfg(feature = "torch")]
mod states;

use overdrive_sched::{Plan, ScheduleError, Scheduler};

/// The rates of one group from step 0 to `steps`.
fn rates(schedule: impl Into<Plan>, base_lr: f64, steps: u64) -> Result<Vec<f64>, ScheduleError> {
    let mut sched = Scheduler::new(&[base_lr], schedule)?;
    let mut rates = vec![sched.last_lr()[0]];
    for _ in 0..steps {
        rates.push(sched.step()?[0]);
    }
    Ok(rates)
}

fn near(found: f64, expected: f64) {
    assert!((found - expected).abs() <= 1e-12 * expected.abs(), "{found:e}, not {expected:e}");
}
