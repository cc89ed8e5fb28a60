//! Medians and quantiles.

use crate::ProfileError;

/// The value below which a share of the sorted numbers lies, interpolated as NumPy does. 0 without numbers.
pub(super) fn quantile(sorted: &[f64], share: f64) -> f64 {
    let Some(last) = sorted.len().checked_sub(1) else { return 0.0 };
    let place = share.clamp(0.0, 1.0) * last as f64;
    let below = place as usize;
    let above = (below + 1).min(last);
    sorted[below] + (sorted[above] - sorted[below]) * (place - below as f64)
}

/// The lower median: of two ranks, the faster one shows what is possible.
pub(super) fn low_median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    numbers.get(numbers.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

/// Refuses times that are negative, infinite or not a number.
pub(super) fn checked_seconds(name: &'static str, seconds: f64) -> Result<f64, ProfileError> {
    if seconds.is_finite() && seconds >= 0.0 {
        return Ok(seconds);
    }
    let problem = "should be a finite number of seconds, 0 or more".to_owned();
    Err(ProfileError::Setting { name, value: seconds.to_string(), problem })
}
