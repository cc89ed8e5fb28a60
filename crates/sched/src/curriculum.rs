//! Curricula: the fraction of the data to train on at a step, easy samples first.

use crate::ScheduleError;
use crate::error::Check;

/// The fraction of the data, easiest first, that may be used at a step: the pacing function of a curriculum.
///
/// ```
/// use overdrive_sched::Curriculum;
///
/// let curriculum = Curriculum::root(0.25, 2.0, 1000)?;
/// assert_eq!(curriculum.share(0), 0.25);
/// assert_eq!(curriculum.samples(0, 50_000), 12_500);
/// assert_eq!(curriculum.samples(1000, 50_000), 50_000);
/// # Ok::<(), overdrive_sched::ScheduleError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Curriculum {
    start: f64,
    pacing: Pacing,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Pacing {
    Linear { steps: u64 },
    Root { power: f64, steps: u64 },
    Step { at: u64 },
    Exponential { increase: f64, step_length: u64 },
}

impl Curriculum {
    /// Grows linearly from the fraction `start` to all data at the step `steps`.
    ///
    /// # Errors
    /// [`ScheduleError::InvalidOption`] for a `start` that is not above 0 and at most 1, or `steps` of 0.
    ///
    /// # Source
    /// Platanios et al., "Competence-based Curriculum Learning for Neural Machine Translation" (2019), eq. 6.
    pub fn linear(start: f64, steps: u64) -> Result<Self, ScheduleError> {
        CHECK.at_least_1("steps", steps)?;
        Self::new(start, Pacing::Linear { steps })
    }

    /// Grows fast at first and slower later: `(t * (1 - start^power) + start^power)^(1 / power)` with
    /// `t = step / steps`. A power of 2 is the square-root competence.
    ///
    /// # Errors
    /// As [`linear`](Self::linear), and for a `power` that is not finite and above 0.
    ///
    /// # Source
    /// Platanios et al. (2019), eq. 7 and 8.
    pub fn root(start: f64, power: f64, steps: u64) -> Result<Self, ScheduleError> {
        CHECK.at_least_1("steps", steps)?;
        CHECK.positive("power", power)?;
        Self::new(start, Pacing::Root { power, steps })
    }

    /// The fraction `start` before the step `at`, and all data from there on.
    ///
    /// # Errors
    /// [`ScheduleError::InvalidOption`] for a `start` that is not above 0 and at most 1.
    ///
    /// # Source
    /// Bengio et al., "Curriculum Learning" (2009); the single-step pacing of Hacohen and Weinshall (2019).
    pub fn step(start: f64, at: u64) -> Result<Self, ScheduleError> {
        Self::new(start, Pacing::Step { at })
    }

    /// Starts at `start`, and multiplies by `increase` after every `step_length` steps, up to all data.
    ///
    /// # Errors
    /// [`ScheduleError::InvalidOption`] for a `start` that is not above 0 and at most 1, an `increase` that is not
    /// finite and at least 1, or a `step_length` of 0.
    ///
    /// # Source
    /// The fixed exponential pacing of Hacohen and Weinshall, "On The Power of Curriculum Learning in Training Deep
    /// Networks" (2019).
    pub fn exponential(start: f64, increase: f64, step_length: u64) -> Result<Self, ScheduleError> {
        CHECK.that(increase >= 1.0 && increase.is_finite(), "increase", "finite and at least 1", increase)?;
        CHECK.at_least_1("step_length", step_length)?;
        Self::new(start, Pacing::Exponential { increase, step_length })
    }

    /// The fraction of the data at a step, above 0 and at most 1.
    pub fn share(&self, step: u64) -> f64 {
        let start = self.start;
        let share = match self.pacing {
            Pacing::Linear { steps } => start + (1.0 - start) * progress(step, steps),
            Pacing::Root { power, steps } => {
                let base = start.powf(power);
                (progress(step, steps) * (1.0 - base) + base).powf(power.recip())
            }
            Pacing::Step { at } => {
                if step < at {
                    start
                } else {
                    1.0
                }
            }
            Pacing::Exponential { increase, step_length } => start * increase.powf((step / step_length) as f64),
        };
        share.clamp(start, 1.0)
    }

    /// How many of `total` samples may be used at a step; at least one, unless `total` is 0.
    pub fn samples(&self, step: u64, total: usize) -> usize {
        ((self.share(step) * total as f64).ceil() as usize).min(total)
    }

    fn new(start: f64, pacing: Pacing) -> Result<Self, ScheduleError> {
        CHECK.positive_fraction("start", start)?;
        Ok(Self { start, pacing })
    }
}

const CHECK: Check = Check("Curriculum");

fn progress(step: u64, steps: u64) -> f64 {
    (step as f64 / steps as f64).min(1.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_go_from_the_start_to_everything_and_stay_there() -> Result<(), ScheduleError> {
        for curriculum in [
            Curriculum::linear(0.1, 40)?,
            Curriculum::root(0.1, 2.0, 40)?,
            Curriculum::step(0.1, 40)?,
            Curriculum::exponential(0.1, 2.0, 10)?,
        ] {
            assert_eq!(curriculum.share(0), 0.1, "{curriculum:?}");
            assert!((0..80).all(|step| curriculum.share(step) <= curriculum.share(step + 1)), "{curriculum:?}");
            assert!(curriculum.share(39) < 1.0);
            assert_eq!((curriculum.share(40), curriculum.share(u64::MAX)), (1.0, 1.0), "{curriculum:?}");
            assert_eq!((curriculum.samples(0, 5), curriculum.samples(40, 5), curriculum.samples(9, 0)), (1, 5, 0));
        }
        Ok(())
    }

    #[test]
    fn values_in_between_are_those_of_the_papers() -> Result<(), ScheduleError> {
        let near = |found: f64, expected: f64| assert!((found - expected).abs() < 1e-15, "{found}, not {expected}");
        near(Curriculum::linear(0.2, 100)?.share(25), 0.4);
        near(Curriculum::root(0.01, 2.0, 100)?.share(25), (0.25f64 * (1.0 - 0.0001) + 0.0001).sqrt());
        near(Curriculum::root(0.2, 1.0, 100)?.share(25), 0.4);
        near(Curriculum::exponential(0.04, 1.9, 10)?.share(25), 0.04 * 1.9 * 1.9);
        Ok(())
    }

    #[test]
    fn options_out_of_range_are_named() {
        let refused = |option, result: Result<Curriculum, ScheduleError>| {
            assert!(matches!(result, Err(ScheduleError::InvalidOption { option: found, .. }) if found == option));
        };
        for start in [0.0, -0.1, 1.1, f64::NAN] {
            refused("start", Curriculum::linear(start, 1));
            refused("start", Curriculum::root(start, 2.0, 1));
            refused("start", Curriculum::step(start, 1));
            refused("start", Curriculum::exponential(start, 2.0, 1));
        }
        refused("steps", Curriculum::linear(0.1, 0));
        refused("steps", Curriculum::root(0.1, 2.0, 0));
        refused("power", Curriculum::root(0.1, 0.0, 1));
        refused("increase", Curriculum::exponential(0.1, 0.9, 1));
        refused("increase", Curriculum::exponential(0.1, f64::INFINITY, 1));
        refused("step_length", Curriculum::exponential(0.1, 2.0, 0));
    }
}
