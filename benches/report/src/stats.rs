//! Medians, and ratios of measurements that were taken in pairs.
//!
//! A shared machine slows down and speeds up while a benchmark runs. Two contenders measured right after each other run
//! at nearly the same speed of the machine. So the ratio of each such pair is fair where the ratio of two averages is
//! not, and the median of the ratios leaves out the outliers.

use serde::{Deserialize, Serialize};

/// The median, the smallest and the largest of some measurements.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Spread {
    /// The median.
    pub median: f64,
    /// The smallest value.
    pub low: f64,
    /// The largest value.
    pub high: f64,
}

impl Spread {
    /// The spread of `values`, or `None` where there are none or one of them is not a finite number.
    pub fn of(values: &[f64]) -> Option<Self> {
        let mut sorted = values.to_vec();
        if sorted.is_empty() || sorted.iter().any(|value| !value.is_finite()) {
            return None;
        }
        sorted.sort_by(f64::total_cmp);
        let middle = sorted.len() / 2;
        let median = if sorted.len() % 2 == 1 { sorted[middle] } else { (sorted[middle - 1] + sorted[middle]) / 2.0 };
        Some(Self { median, low: sorted[0], high: sorted[sorted.len() - 1] })
    }

    /// The spread of `numerators[i] / denominators[i]`: one ratio per pair, not a ratio of two medians.
    ///
    /// `None` where there is no pair, the lengths differ, or a ratio is not a finite number.
    pub fn of_ratios(numerators: &[f64], denominators: &[f64]) -> Option<Self> {
        if numerators.len() != denominators.len() {
            return None;
        }
        let ratios: Vec<f64> = numerators.iter().zip(denominators).map(|(above, below)| above / below).collect();
        Self::of(&ratios)
    }
}

/// The median of `values`, or `None` where there are none or one of them is not a finite number.
pub fn median(values: &[f64]) -> Option<f64> {
    Spread::of(values).map(|spread| spread.median)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_of_an_even_count_lies_between_the_two_in_the_middle() {
        assert_eq!(median(&[4.0, 1.0, 3.0]), Some(3.0));
        assert_eq!(median(&[4.0, 1.0, 3.0, 2.0]), Some(2.5));
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[1.0, f64::NAN]), None);
    }

    #[test]
    fn ratios_are_taken_pair_by_pair() {
        // Ours is twice as fast in each turn, though the machine was ten times slower in the second one.
        let spread = Spread::of_ratios(&[2.0, 20.0, 4.0], &[1.0, 10.0, 2.0]).unwrap();
        assert_eq!(spread, Spread { median: 2.0, low: 2.0, high: 2.0 });
        assert_eq!(Spread::of_ratios(&[1.0], &[1.0, 2.0]), None);
        assert_eq!(Spread::of_ratios(&[1.0], &[0.0]), None);
    }
}
