//! Pacing functions of a curriculum: they map its progress, 0 to 1, to the share of the data that is in use.
//!
//! [`Curriculum`](crate::Curriculum) takes any other `Fn(f64) -> f64` as well.

use crate::DataError;

fn share(option: &'static str, value: f64) -> Result<f64, DataError> {
    if value > 0.0 && value <= 1.0 {
        return Ok(value);
    }
    Err(DataError::option(option, "a share above 0, at most 1", value))
}

fn positive(option: &'static str, value: f64) -> Result<f64, DataError> {
    if value > 0.0 && value.is_finite() {
        return Ok(value);
    }
    Err(DataError::option(option, "a finite number above 0", value))
}

/// Grows linearly from the share `start` to all data.
///
/// # Errors
/// [`DataError::InvalidOption`] for a `start` that is not above 0 and at most 1.
///
/// # Source
/// Platanios et al., "Competence-based Curriculum Learning for Neural Machine Translation" (2019), eq. 6.
pub fn linear(start: f64) -> Result<impl Fn(f64) -> f64 + Copy + Send + Sync + 'static, DataError> {
    let start = share("start", start)?;
    Ok(move |progress: f64| (start + (1.0 - start) * progress).min(1.0))
}

/// Fast at first and slower later: `(progress * (1 - start^power) + start^power)^(1 / power)`.
///
/// With a power of 2 this is the square-root competence: samples are added at a rate inversely proportional to their
/// present number, so that each new sample is seen equally often.
///
/// # Errors
/// [`DataError::InvalidOption`] for a `start` that is not above 0 and at most 1, or a `power` that is not above 0.
///
/// # Source
/// Platanios et al. (2019), eq. 7 and 8.
pub fn root(start: f64, power: f64) -> Result<impl Fn(f64) -> f64 + Copy + Send + Sync + 'static, DataError> {
    let (start, power) = (share("start", start)?, positive("power", power)?);
    let base = start.powf(power);
    Ok(move |progress: f64| (progress * (1.0 - base) + base).powf(power.recip()).min(1.0))
}

/// The share `start` until the progress `at`, and all data from there on.
///
/// # Errors
/// [`DataError::InvalidOption`] for a `start` or an `at` that is not above 0 and at most 1.
///
/// # Source
/// Bengio et al., "Curriculum Learning" (2009); the single-step pacing of Hacohen and Weinshall (2019).
pub fn step(start: f64, at: f64) -> Result<impl Fn(f64) -> f64 + Copy + Send + Sync + 'static, DataError> {
    let (start, at) = (share("start", start)?, share("at", at)?);
    Ok(move |progress: f64| if progress < at { start } else { 1.0 })
}

/// Multiplies the share by `increase` after each `step_length` of progress, from `start` up to all data: `start *
/// increase^floor(progress / step_length)`.
///
/// # Errors
/// [`DataError::InvalidOption`] for a `start` or `step_length` that is not above 0 and at most 1, or an `increase` that
/// is not above 0.
///
/// # Source
/// The fixed exponential pacing of Hacohen and Weinshall, "On The Power of Curriculum Learning in Training Deep
/// Networks" (2019), with the step length as a share of the curriculum.
pub fn exponential(
    start: f64,
    increase: f64,
    step_length: f64,
) -> Result<impl Fn(f64) -> f64 + Copy + Send + Sync + 'static, DataError> {
    let (start, increase) = (share("start", start)?, positive("increase", increase)?);
    let step_length = share("step_length", step_length)?;
    Ok(move |progress: f64| (start * increase.powf((progress / step_length).floor())).min(1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn near(found: f64, expected: f64) {
        assert!((found - expected).abs() < 1e-12, "{found}, expected {expected}");
    }

    fn check(share: impl Fn(f64) -> f64) {
        near(share(0.0), 0.1);
        near(share(1.0), 1.0);
        assert!((1..=200).all(|i| share(f64::from(i) / 100.0) >= share(f64::from(i - 1) / 100.0)));
        near(share(5.0), 1.0);
    }

    #[test]
    fn pacing_goes_from_the_start_to_all_data() -> Result<(), DataError> {
        check(linear(0.1)?);
        check(root(0.1, 2.0)?);
        check(step(0.1, 0.5)?);
        check(exponential(0.1, 10.0, 1.0)?);
        Ok(())
    }

    #[test]
    fn values_in_between_are_those_of_the_papers() -> Result<(), DataError> {
        near(linear(0.2)?(0.25), 0.4);
        near(root(0.01, 2.0)?(0.25), (0.25f64 * (1.0 - 0.0001) + 0.0001).sqrt());
        near(root(0.2, 1.0)?(0.25), 0.4);
        near(step(0.3, 0.5)?(0.49), 0.3);
        near(exponential(0.04, 1.9, 0.1)?(0.25), 0.04 * 1.9 * 1.9);
        Ok(())
    }

    #[test]
    fn shares_out_of_range_are_refused() {
        let refused = |option, error: Option<DataError>| {
            assert!(matches!(error, Some(DataError::InvalidOption { option: found, .. }) if found == option));
        };
        refused("start", linear(0.0).err());
        refused("start", linear(f64::NAN).err());
        refused("start", root(1.1, 2.0).err());
        refused("power", root(0.5, 0.0).err());
        refused("at", step(0.5, -0.1).err());
        refused("increase", exponential(0.5, f64::INFINITY, 0.1).err());
        refused("step_length", exponential(0.5, 2.0, 0.0).err());
    }
}
