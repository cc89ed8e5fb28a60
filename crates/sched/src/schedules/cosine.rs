//! Cosine annealing, with and without restarts.

use std::f64::consts::PI;

use crate::error::Check;
use crate::{At, Schedule, ScheduleError};

/// Cosine annealing from the base rate to `eta_min` within `t_max` steps, and back up after that.
///
/// ```
/// use overdrive_sched::{CosineAnnealingLr, Scheduler};
///
/// let mut sched = Scheduler::new(&[0.1], CosineAnnealingLr::new(100).eta_min(1e-4))?;
/// sched.seek(100)?;
/// assert_eq!(sched.last_lr(), [1e-4]);
/// # Ok::<(), overdrive_sched::ScheduleError>(())
/// ```
///
/// # Source
/// `CosineAnnealingLR`, with each rate computed from the previous one; Loshchilov and Hutter, "SGDR" (2017).
#[doc(alias = "CosineAnnealingLR")]
#[derive(Clone, Debug, PartialEq)]
#[must_use = "a schedule does nothing until a scheduler runs it"]
pub struct CosineAnnealingLr {
    t_max: u64,
    eta_min: f64,
}

impl CosineAnnealingLr {
    /// Reaches the lowest rate within `t_max` steps, at least 1.
    pub fn new(t_max: u64) -> Self {
        Self { t_max, eta_min: 0.0 }
    }

    /// The lowest rate; default 0.
    pub fn eta_min(mut self, eta_min: f64) -> Self {
        self.eta_min = eta_min;
        self
    }

    /// Whether the previous step was at the minimum, where the recursion would divide by zero.
    fn leaves_the_bottom(&self, step: u64) -> bool {
        let (step, t_max) = (u128::from(step), u128::from(self.t_max));
        (step + t_max).checked_sub(1).is_some_and(|past| past.is_multiple_of(2 * t_max))
    }
}

impl Schedule for CosineAnnealingLr {
    fn name(&self) -> &'static str {
        "CosineAnnealingLr"
    }

    fn lr(&self, at: &At) -> f64 {
        let (step, t_max) = (at.step as f64, self.t_max as f64);
        if at.initial {
            at.lr
        } else if self.leaves_the_bottom(at.step) {
            at.lr + (at.base_lr - self.eta_min) * (1.0 - (PI / t_max).cos()) / 2.0
        } else {
            (1.0 + (PI * step / t_max).cos()) / (1.0 + (PI * (step - 1.0) / t_max).cos()) * (at.lr - self.eta_min)
                + self.eta_min
        }
    }

    fn restart(&self, at: &At) -> f64 {
        self.eta_min + (at.base_lr - self.eta_min) * 2.0 / 2.0
    }

    fn check(&self, _groups: usize) -> Result<(), ScheduleError> {
        let check = Check(self.name());
        check.at_least_1("t_max", self.t_max)?;
        check.factor("eta_min", self.eta_min)
    }
}

/// Cosine annealing from the base rate to `eta_min` with restarts. Each cycle is `t_mult` times as long as the one
/// before.
///
/// # Source
/// `CosineAnnealingWarmRestarts`; Loshchilov and Hutter, "SGDR" (2017).
#[doc(alias = "SGDR")]
#[derive(Clone, Debug, PartialEq)]
#[must_use = "a schedule does nothing until a scheduler runs it"]
pub struct CosineAnnealingWarmRestarts {
    t_0: u64,
    t_mult: u64,
    eta_min: f64,
}

impl CosineAnnealingWarmRestarts {
    /// The first cycle takes `t_0` steps, at least 1.
    pub fn new(t_0: u64) -> Self {
        Self { t_0, t_mult: 1, eta_min: 0.0 }
    }

    /// The ratio of the length of a cycle to the previous one's, at least 1; default 1.
    pub fn t_mult(mut self, t_mult: u64) -> Self {
        self.t_mult = t_mult;
        self
    }

    /// The lowest rate; default 0.
    pub fn eta_min(mut self, eta_min: f64) -> Self {
        self.eta_min = eta_min;
        self
    }

    /// The rate at a fractional epoch, to count epochs but set the rate at every batch. NaN for an epoch that is
    /// negative or not finite.
    ///
    /// # Source
    /// `CosineAnnealingWarmRestarts.step(epoch + batch / batches)`
    pub fn lr_at(&self, base_lr: f64, epoch: f64) -> f64 {
        if !(0.0..f64::INFINITY).contains(&epoch) {
            return f64::NAN;
        }
        let (t_0, t_mult) = (self.t_0 as f64, self.t_mult as f64);
        if epoch < t_0 {
            return self.at(base_lr, epoch, t_0);
        }
        if self.t_mult <= 1 {
            return self.at(base_lr, epoch % t_0, t_0);
        }
        // The number of completed cycles.
        let cycles = ((epoch / t_0 * (t_mult - 1.0) + 1.0).ln() / t_mult.ln()).trunc();
        let since = epoch - t_0 * (t_mult.powf(cycles) - 1.0) / (t_mult - 1.0);
        self.at(base_lr, since, t_0 * t_mult.powf(cycles))
    }

    /// The rate `since` steps into a cycle of `length`.
    fn at(&self, base_lr: f64, since: f64, length: f64) -> f64 {
        self.eta_min + (base_lr - self.eta_min) * (1.0 + (PI * since / length).cos()) / 2.0
    }

    /// The number of steps since the cycle began, and the cycle's length.
    fn place(&self, step: u64) -> (u64, u64) {
        let (mut since, mut length) = (step, self.t_0.max(1));
        if self.t_mult <= 1 {
            return (since % length, length);
        }
        // Lengths at least double, so there are at most 64 iterations.
        while since >= length {
            since -= length;
            length = length.saturating_mul(self.t_mult);
        }
        (since, length)
    }
}

impl Schedule for CosineAnnealingWarmRestarts {
    fn name(&self) -> &'static str {
        "CosineAnnealingWarmRestarts"
    }

    fn lr(&self, at: &At) -> f64 {
        let (since, length) = self.place(at.step);
        self.at(at.base_lr, since as f64, length as f64)
    }

    fn check(&self, _groups: usize) -> Result<(), ScheduleError> {
        let check = Check(self.name());
        check.at_least_1("t_0", self.t_0)?;
        check.at_least_1("t_mult", self.t_mult)?;
        check.factor("eta_min", self.eta_min)
    }
}
