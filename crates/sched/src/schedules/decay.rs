//! Decay by a factor: every few steps, at given steps, or at every step.

use crate::error::Check;
use crate::{At, Schedule, ScheduleError};

/// Multiplies the rate by `gamma` every `step_size` steps.
///
/// # Source
/// `StepLR`
#[doc(alias = "StepLR")]
#[derive(Clone, Debug, PartialEq)]
#[must_use = "a schedule does nothing until a scheduler runs it"]
pub struct StepLr {
    step_size: u64,
    gamma: f64,
}

impl StepLr {
    /// A schedule that multiplies the rate every `step_size` steps, which should be at least 1.
    pub fn new(step_size: u64) -> Self {
        Self { step_size, gamma: 0.1 }
    }

    /// The factor; default 0.1.
    pub fn gamma(mut self, gamma: f64) -> Self {
        self.gamma = gamma;
        self
    }
}

impl Schedule for StepLr {
    fn name(&self) -> &'static str {
        "StepLr"
    }

    fn lr(&self, at: &At) -> f64 {
        if at.step == 0 || !at.step.is_multiple_of(self.step_size) { at.lr } else { at.lr * self.gamma }
    }

    fn restart(&self, at: &At) -> f64 {
        at.base_lr
    }

    fn check(&self, _groups: usize) -> Result<(), ScheduleError> {
        let check = Check(self.name());
        check.at_least_1("step_size", self.step_size)?;
        check.factor("gamma", self.gamma)
    }
}

/// Multiplies the rate by `gamma` at each milestone.
///
/// # Source
/// `MultiStepLR`
#[doc(alias = "MultiStepLR")]
#[derive(Clone, Debug, PartialEq)]
#[must_use = "a schedule does nothing until a scheduler runs it"]
pub struct MultiStepLr {
    milestones: Vec<u64>,
    gamma: f64,
}

impl MultiStepLr {
    /// A schedule with these milestones, in ascending order. A step given twice counts twice.
    pub fn new(milestones: impl IntoIterator<Item = u64>) -> Self {
        Self { milestones: milestones.into_iter().collect(), gamma: 0.1 }
    }

    /// The factor; default 0.1.
    pub fn gamma(mut self, gamma: f64) -> Self {
        self.gamma = gamma;
        self
    }

    /// How often a step is among the milestones.
    fn count(&self, step: u64) -> f64 {
        self.milestones.iter().filter(|milestone| **milestone == step).count() as f64
    }
}

impl Schedule for MultiStepLr {
    fn name(&self) -> &'static str {
        "MultiStepLr"
    }

    fn lr(&self, at: &At) -> f64 {
        let count = self.count(at.step);
        if count == 0.0 { at.lr } else { at.lr * self.gamma.powf(count) }
    }

    fn restart(&self, at: &At) -> f64 {
        at.base_lr * self.gamma.powf(self.count(0))
    }

    fn check(&self, _groups: usize) -> Result<(), ScheduleError> {
        let check = Check(self.name());
        let found = format_args!("{:?}", self.milestones).to_string();
        check.that(self.milestones.is_sorted(), "milestones", "steps in ascending order", found)?;
        check.factor("gamma", self.gamma)
    }
}

/// Multiplies the rate by `gamma` at each step.
///
/// # Source
/// `ExponentialLR`
#[doc(alias = "ExponentialLR")]
#[derive(Clone, Debug, PartialEq)]
#[must_use = "a schedule does nothing until a scheduler runs it"]
pub struct ExponentialLr {
    gamma: f64,
}

impl ExponentialLr {
    /// A schedule with this factor.
    pub fn new(gamma: f64) -> Self {
        Self { gamma }
    }
}

impl Schedule for ExponentialLr {
    fn name(&self) -> &'static str {
        "ExponentialLr"
    }

    fn lr(&self, at: &At) -> f64 {
        if at.initial { at.lr } else { at.lr * self.gamma }
    }

    fn restart(&self, at: &At) -> f64 {
        at.base_lr
    }

    fn check(&self, _groups: usize) -> Result<(), ScheduleError> {
        Check(self.name()).factor("gamma", self.gamma)
    }
}
