//! The rates of stochastic weight averaging.

use std::f64::consts::PI;

use crate::error::Check;
use crate::{AnnealStrategy, At, PerGroup, Schedule, ScheduleError};

/// Moves the rate from its present value to a constant one, at which weights are averaged.
///
/// It is the last part of a schedule: `SequentialLr::new(schedule).then(160, SwaLr::new(0.05))`.
///
/// # Source
/// `torch.optim.swa_utils.SWALR`; Izmailov et al., "Averaging Weights Leads to Wider Optima", 2018. PyTorch steps it
/// instead of another schedule of the same optimizer, from an epoch on.
#[doc(alias = "SWALR")]
#[derive(Clone, Debug, PartialEq)]
#[must_use = "a schedule does nothing until a scheduler runs it"]
pub struct SwaLr {
    swa_lr: PerGroup,
    anneal_epochs: u64,
    anneal_strategy: AnnealStrategy,
}

impl SwaLr {
    /// A schedule that takes 10 steps of cosine annealing to this rate, for all groups or for each.
    pub fn new(swa_lr: impl Into<PerGroup>) -> Self {
        Self { swa_lr: swa_lr.into(), anneal_epochs: 10, anneal_strategy: AnnealStrategy::Cos }
    }

    /// The number of steps to the constant rate; default 10.
    pub fn anneal_epochs(mut self, anneal_epochs: u64) -> Self {
        self.anneal_epochs = anneal_epochs;
        self
    }

    /// The curve to the constant rate; default [`AnnealStrategy::Cos`].
    pub fn anneal_strategy(mut self, anneal_strategy: AnnealStrategy) -> Self {
        self.anneal_strategy = anneal_strategy;
        self
    }

    /// The weight of the constant rate after `step` steps; it rises from 0 to 1.
    fn share(&self, step: u64) -> f64 {
        let part = (step as f64 / self.anneal_epochs.max(1) as f64).min(1.0);
        match self.anneal_strategy {
            AnnealStrategy::Cos => (1.0 - (PI * part).cos()) / 2.0,
            AnnealStrategy::Linear => part,
        }
    }
}

impl Schedule for SwaLr {
    fn name(&self) -> &'static str {
        "SwaLr"
    }

    fn lr(&self, at: &At) -> f64 {
        let (swa_lr, step) = (self.swa_lr.get(at.group), at.step.max(u64::from(self.anneal_epochs == 0)));
        let before = self.share(step.saturating_sub(1));
        // The rate before the first step, from the previous rate and the weight of the constant rate in it.
        let initial = if before == 1.0 { swa_lr } else { (at.lr - before * swa_lr) / (1.0 - before) };
        let share = self.share(step);
        swa_lr * share + initial * (1.0 - share)
    }

    fn check(&self, groups: usize) -> Result<(), ScheduleError> {
        Check(self.name()).per_group("swa_lr", &self.swa_lr, groups, Check::factor)
    }
}
