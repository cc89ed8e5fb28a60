//! Whether something else used the machine during a timing.

use serde::{Deserialize, Serialize};

/// With at least this many CPUs stolen, or used by other processes, a timing counts as disturbed.
const TOO_MUCH: f64 = 0.1;
/// Below this pace, relative to the best one, a timing counts as disturbed.
const SLOWEST_PACE: f64 = 0.8;

/// What else used the machine during a timing, on average.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Disturbance {
    /// CPUs that the hypervisor gave to other machines (`steal` of `/proc/stat`).
    pub stolen_cpus: f64,
    /// CPUs that other processes of this machine used.
    pub other_cpus: f64,
    /// The speed of fixed work on all cores before and after the timing, relative to the best seen; the lower of both.
    pub pace: f64,
}

impl Default for Disturbance {
    fn default() -> Self {
        Self { stolen_cpus: 0.0, other_cpus: 0.0, pace: 1.0 }
    }
}

impl Disturbance {
    /// Whether the timing is disturbed. A value that is not a number counts as disturbed.
    pub fn is_too_much(&self) -> bool {
        !(self.stolen_cpus < TOO_MUCH && self.other_cpus < TOO_MUCH && self.pace > SLOWEST_PACE)
    }

    /// The mean over the parts of a timing, each with its seconds.
    pub fn mean(parts: &[(f64, Self)]) -> Self {
        let total: f64 = parts.iter().map(|(seconds, _)| seconds).sum();
        let mean = |value: fn(&Self) -> f64| parts.iter().map(|(seconds, it)| seconds * value(it)).sum::<f64>() / total;
        Self { stolen_cpus: mean(|it| it.stolen_cpus), other_cpus: mean(|it| it.other_cpus), pace: mean(|it| it.pace) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_goes_by_time() {
        let busy = Disturbance { stolen_cpus: 0.0, other_cpus: 1.0, pace: 0.6 };
        let mean = Disturbance::mean(&[(3.0, Disturbance::default()), (1.0, busy)]);
        assert_eq!(mean, Disturbance { stolen_cpus: 0.0, other_cpus: 0.25, pace: 0.9 });
        assert!(Disturbance::mean(&[]).is_too_much(), "nothing is known");
    }

    #[test]
    fn each_kind_is_too_much_by_itself_and_what_is_unknown_is_too_much() {
        let quiet = Disturbance::default();
        assert!(!quiet.is_too_much());
        assert!(!Disturbance { stolen_cpus: 0.05, other_cpus: 0.05, pace: 0.9 }.is_too_much());
        assert!(Disturbance { stolen_cpus: 0.3, ..quiet }.is_too_much());
        assert!(Disturbance { other_cpus: 1.0, ..quiet }.is_too_much());
        assert!(Disturbance { pace: 0.5, ..quiet }.is_too_much());
        assert!(Disturbance { other_cpus: f64::NAN, ..quiet }.is_too_much());
    }
}
