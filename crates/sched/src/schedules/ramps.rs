//! Schedules that end after a fixed number of steps: a constant factor, a linear one, and a polynomial decay.
//!
//! As in PyTorch, a schedule computes the rate from the rate of the step before, not from the base rate, so that
//! chained schedules multiply.

use crate::error::Check;
use crate::{At, Schedule, ScheduleError};

/// The base rate times `factor` for the first `total_iters` steps.
///
/// # Source
/// `ConstantLR`. PyTorch also accepts a factor of 0, and divides by it at the end.
#[doc(alias = "ConstantLR")]
#[derive(Clone, Debug, PartialEq)]
#[must_use = "a schedule does nothing until a scheduler runs it"]
pub struct ConstantLr {
    factor: f64,
    total_iters: u64,
}

impl ConstantLr {
    /// A third of the base rate for 5 steps.
    #[allow(clippy::new_without_default)] // starts a builder, like the other schedules' `new`
    pub fn new() -> Self {
        Self { factor: 1.0 / 3.0, total_iters: 5 }
    }

    /// The factor, above 0 and at most 1; default 1/3.
    pub fn factor(mut self, factor: f64) -> Self {
        self.factor = factor;
        self
    }

    /// The number of steps; default 5. With 0 the factor applies forever, as in PyTorch.
    pub fn total_iters(mut self, total_iters: u64) -> Self {
        self.total_iters = total_iters;
        self
    }
}

impl Schedule for ConstantLr {
    fn name(&self) -> &'static str {
        "ConstantLr"
    }

    fn lr(&self, at: &At) -> f64 {
        if at.step == 0 {
            at.lr * self.factor
        } else if at.step == self.total_iters {
            at.lr * (1.0 / self.factor)
        } else {
            at.lr
        }
    }

    fn restart(&self, at: &At) -> f64 {
        at.base_lr * self.factor
    }

    fn check(&self, _groups: usize) -> Result<(), ScheduleError> {
        let check = Check(self.name());
        check.positive_fraction("factor", self.factor)
    }
}

/// The base rate times a factor that changes linearly from `start_factor` to `end_factor` within `total_iters` steps,
/// usually a warm-up.
///
/// # Source
/// `LinearLR`
#[doc(alias = "LinearLR")]
#[derive(Clone, Debug, PartialEq)]
#[must_use = "a schedule does nothing until a scheduler runs it"]
pub struct LinearLr {
    start_factor: f64,
    end_factor: f64,
    total_iters: u64,
}

impl LinearLr {
    /// From a third of the base rate to all of it within 5 steps.
    #[allow(clippy::new_without_default)] // see `ConstantLr::new`
    pub fn new() -> Self {
        Self { start_factor: 1.0 / 3.0, end_factor: 1.0, total_iters: 5 }
    }

    /// The factor at step 0, above 0 and at most 1; default 1/3.
    pub fn start_factor(mut self, start_factor: f64) -> Self {
        self.start_factor = start_factor;
        self
    }

    /// The final factor, from 0 to 1; default 1.
    pub fn end_factor(mut self, end_factor: f64) -> Self {
        self.end_factor = end_factor;
        self
    }

    /// The number of steps; default 5. With 0 the factor stays at `start_factor`, as in PyTorch.
    pub fn total_iters(mut self, total_iters: u64) -> Self {
        self.total_iters = total_iters;
        self
    }
}

impl Schedule for LinearLr {
    fn name(&self) -> &'static str {
        "LinearLr"
    }

    fn lr(&self, at: &At) -> f64 {
        if at.step == 0 {
            return at.lr * self.start_factor;
        }
        if at.step > self.total_iters {
            return at.lr;
        }
        let rise = self.end_factor - self.start_factor;
        // The factor of the step before, times `total_iters`.
        let current = self.total_iters as f64 * self.start_factor + (at.step - 1) as f64 * rise;
        at.lr * (1.0 + rise / current)
    }

    fn restart(&self, at: &At) -> f64 {
        at.base_lr * self.start_factor
    }

    fn check(&self, _groups: usize) -> Result<(), ScheduleError> {
        let check = Check(self.name());
        check.positive_fraction("start_factor", self.start_factor)?;
        check.fraction("end_factor", self.end_factor)
    }
}

/// Polynomial decay from the base rate to zero: base rate * (1 - step / total_iters)^power.
///
/// # Source
/// `PolynomialLR`
#[doc(alias = "PolynomialLR")]
#[derive(Clone, Debug, PartialEq)]
#[must_use = "a schedule does nothing until a scheduler runs it"]
pub struct PolynomialLr {
    total_iters: u64,
    power: f64,
}

impl PolynomialLr {
    /// Linear decay to zero within 5 steps.
    #[allow(clippy::new_without_default)] // see `ConstantLr::new`
    pub fn new() -> Self {
        Self { total_iters: 5, power: 1.0 }
    }

    /// The number of steps; default 5. With 0 the rate does not change, as in PyTorch.
    pub fn total_iters(mut self, total_iters: u64) -> Self {
        self.total_iters = total_iters;
        self
    }

    /// The power, at least 0; default 1.
    pub fn power(mut self, power: f64) -> Self {
        self.power = power;
        self
    }
}

impl Schedule for PolynomialLr {
    fn name(&self) -> &'static str {
        "PolynomialLr"
    }

    fn lr(&self, at: &At) -> f64 {
        // As in PyTorch, which tests here whether the value is the initial one, and in the others whether the step is
        // 0.
        if at.initial || self.total_iters == 0 || at.step > self.total_iters {
            return at.lr;
        }
        let (step, total) = (at.step as f64, self.total_iters as f64);
        at.lr * ((1.0 - step / total) / (1.0 - (step - 1.0) / total)).powf(self.power)
    }

    fn restart(&self, at: &At) -> f64 {
        at.base_lr
    }

    fn check(&self, _groups: usize) -> Result<(), ScheduleError> {
        let check = Check(self.name());
        check.factor("power", self.power)
    }
}
