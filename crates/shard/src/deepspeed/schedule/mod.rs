//! DeepSpeed's learning rate schedules.

mod one_cycle;
mod read;
#[cfg(test)]
mod tests;
mod warmup;

use overdrive_sched::{At, PerGroup, Schedule, ScheduleError};

use one_cycle::OneCycle;
use warmup::{Decay, WarmupCosine, WarmupLr};

/// A schedule of DeepSpeed's, with its values: `WarmupLR`, `WarmupDecayLR`, `WarmupCosineLR`, `OneCycle` or `LRRangeTest`.
///
/// Give it to an `LrScheduler`, and step that after each step of the optimizer that was not skipped. The rate of the first
/// step is the one that DeepSpeed sets when it is built, before its first iteration: that of iteration 0 again, except
/// that `WarmupCosineLR` begins with a rate of 0.
///
/// # Source
/// `deepspeed.runtime.lr_schedules`
#[derive(Clone, Debug, PartialEq)]
pub struct LrSchedule(Shape);

#[derive(Clone, Debug, PartialEq)]
enum Shape {
    Warmup(WarmupLr),
    Cosine(WarmupCosine),
    OneCycle(OneCycle),
    RangeTest(LrRangeTest),
}

/// The rate rises in a line, or in steps, to find out how large it may be.
#[derive(Clone, Debug, PartialEq)]
struct LrRangeTest {
    min_lr: PerGroup,
    step_size: f64,
    step_rate: f64,
    staircase: bool,
}

impl LrRangeTest {
    fn lr(&self, at: &At) -> f64 {
        let interval = at.step as f64 / self.step_size;
        let interval = if self.staircase { interval.floor() } else { interval };
        self.min_lr.get(at.group) * (1.0 + self.step_rate * interval)
    }
}

impl LrSchedule {
    /// Whether it cycles the momentum, and with it DeepSpeed sets the second of `betas`.
    pub(super) fn cycles_momentum(&self) -> bool {
        matches!(&self.0, Shape::OneCycle(cycle) if cycle.momentum.is_some())
    }

    /// The options with a value for each group.
    fn per_group(&self) -> Vec<(&'static str, &PerGroup)> {
        match &self.0 {
            Shape::Warmup(it) => {
                let max = it.max_lr.as_ref().map(|max| ("warmup_max_lr", max));
                [Some(("warmup_min_lr", &it.min_lr)), max].into_iter().flatten().collect()
            }
            Shape::Cosine(_) => Vec::new(),
            Shape::OneCycle(it) => {
                let momentum = it.momentum.iter();
                let momentum = momentum.flat_map(|it| [("cycle_min_mom", &it.min), ("cycle_max_mom", &it.max)]);
                [("cycle_min_lr", &it.min_lr), ("cycle_max_lr", &it.max_lr)].into_iter().chain(momentum).collect()
            }
            Shape::RangeTest(it) => vec![("lr_range_test_min_lr", &it.min_lr)],
        }
    }
}

impl Schedule for LrSchedule {
    fn name(&self) -> &'static str {
        match &self.0 {
            Shape::Warmup(WarmupLr { decay: Decay::None, .. }) => "WarmupLR",
            Shape::Warmup(WarmupLr { decay: Decay::Linear { .. }, .. }) => "WarmupDecayLR",
            Shape::Cosine(_) => "WarmupCosineLR",
            Shape::OneCycle(_) => "OneCycle",
            Shape::RangeTest(_) => "LRRangeTest",
        }
    }

    fn lr(&self, at: &At) -> f64 {
        match &self.0 {
            Shape::Warmup(it) => it.lr(at),
            Shape::Cosine(it) => it.lr(at),
            Shape::OneCycle(it) => it.lr(at),
            Shape::RangeTest(it) => it.lr(at),
        }
    }

    fn momentum(&self, at: &At) -> Option<f64> {
        if let Shape::OneCycle(it) = &self.0 { it.momentum(at) } else { None }
    }

    fn check(&self, groups: usize) -> Result<(), ScheduleError> {
        for (option, values) in self.per_group() {
            if let PerGroup::Each(list) = values
                && list.len() != groups
            {
                let expected = format!("one value, or one for each of {groups} groups");
                let found = format!("{} values", list.len());
                return Err(ScheduleError::InvalidOption { schedule: self.name(), option, expected, found });
            }
        }
        Ok(())
    }
}
