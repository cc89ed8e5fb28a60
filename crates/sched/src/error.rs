//! Why a schedule refused or failed.

use std::fmt::Display;

use crate::PerGroup;

/// Why a schedule refused or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// An option outside its range.
    #[error("{schedule}: `{option}` should be {expected}, but is {found}")]
    InvalidOption {
        /// Whose option it is.
        schedule: &'static str,
        /// The option's name.
        option: &'static str,
        /// What would be right.
        expected: String,
        /// What was given.
        found: String,
    },
    /// A schedule within another one has an option outside its range.
    #[error("part {part} of {schedule}: {error}")]
    InvalidPart {
        /// What the part belongs to.
        schedule: &'static str,
        /// Its place, from 0.
        part: usize,
        /// What is wrong with it.
        error: Box<ScheduleError>,
    },
    /// A schedule has come to a rate that nothing can be trained with.
    #[error("at step {step} the {what} of group {group} would be {found}, but should be {expected}")]
    InvalidValue {
        /// The step.
        step: u64,
        /// The parameter group.
        group: usize,
        /// The learning rate, or the momentum.
        what: &'static str,
        /// What would be right.
        expected: &'static str,
        /// What the schedule says.
        found: f64,
    },
    /// A step behind a schedule's last.
    #[error("{schedule} ends with step {last}: there is no step {step}")]
    Finished {
        /// The schedule that has ended.
        schedule: String,
        /// The last step that it has.
        last: u64,
        /// The step asked for.
        step: u64,
    },
    /// A jump so far ahead that replaying the steps would take too long.
    #[error("step {found} is too far to jump to: it should be at most {limit}")]
    TooFar {
        /// The step asked for.
        found: u64,
        /// The furthest that can be.
        limit: u64,
    },
    /// An optimizer that cannot tell its learning rates (tch's).
    #[error("the optimizer does not tell group {group}'s learning rate: say the rates with `with_base_lrs`")]
    UnknownLr {
        /// The parameter group.
        group: usize,
    },
    /// A learning rate that something else has set since the last step.
    #[error(
        "group {group}'s learning rate is {found}, but this schedule had set {expected}: join schedules with \
         ChainedScheduler, or call `apply` first to set the schedule's rates again"
    )]
    ChangedElsewhere {
        /// The parameter group.
        group: usize,
        /// What the schedule had set.
        expected: f64,
        /// What the optimizer says.
        found: f64,
    },
    /// Two schedules for one optimizer.
    #[error(
        "this optimizer has a schedule already: join schedules with ChainedScheduler or SequentialLr, or drop the other one \
         first"
    )]
    AlreadyScheduled,
    /// A schedule that is stepped with another optimizer than the one that it was made for.
    #[error("this schedule was made for another optimizer: give it that one, or make one for this")]
    OtherOptimizer,
    /// The optimizer refused a rate, or has no momentum to cycle.
    #[cfg(feature = "torch")]
    #[error(transparent)]
    Optimizer(#[from] overdrive_core::OptimizerError),
}

/// Checks options in the name of a schedule.
#[derive(Clone, Copy)]
pub(crate) struct Check(pub &'static str);

impl Check {
    pub fn that(
        self,
        holds: bool,
        option: &'static str,
        expected: impl Display,
        found: impl Display,
    ) -> Result<(), ScheduleError> {
        if holds {
            return Ok(());
        }
        let (expected, found) = (expected.to_string(), found.to_string());
        Err(ScheduleError::InvalidOption { schedule: self.0, option, expected, found })
    }

    pub fn at_least_1(self, option: &'static str, found: u64) -> Result<(), ScheduleError> {
        self.that(found >= 1, option, "at least 1", found)
    }

    /// A number that a learning rate can be, or be multiplied by.
    pub fn factor(self, option: &'static str, found: f64) -> Result<(), ScheduleError> {
        self.that(is_factor(found), option, "finite and at least 0", found)
    }

    pub fn share(self, option: &'static str, found: f64) -> Result<(), ScheduleError> {
        self.that((0.0..=1.0).contains(&found), option, "from 0 to 1", found)
    }

    pub fn positive_share(self, option: &'static str, found: f64) -> Result<(), ScheduleError> {
        self.that(found > 0.0 && found <= 1.0, option, "above 0 and at most 1", found)
    }

    pub fn positive(self, option: &'static str, found: f64) -> Result<(), ScheduleError> {
        self.that(found > 0.0 && found.is_finite(), option, "finite and above 0", found)
    }

    /// One value that `check` accepts for each group, or one for all.
    pub fn per_group(
        self,
        option: &'static str,
        found: &PerGroup,
        groups: usize,
        check: impl Fn(Self, &'static str, f64) -> Result<(), ScheduleError>,
    ) -> Result<(), ScheduleError> {
        match found {
            PerGroup::All(value) => check(self, option, *value),
            PerGroup::Each(values) => {
                let expected = format_args!("one value, or one for each of {groups} groups").to_string();
                self.that(values.len() == groups, option, expected, format_args!("{} values", values.len()))?;
                values.iter().try_for_each(|&value| check(self, option, value))
            }
        }
    }

    pub fn momentum(self, option: &'static str, found: f64) -> Result<(), ScheduleError> {
        self.that((0.0..1.0).contains(&found), option, "at least 0 and below 1", found)
    }
}

/// Finite and not negative. NaN is neither.
pub(crate) fn is_factor(value: f64) -> bool {
    (0.0..f64::INFINITY).contains(&value)
}

/// Base rates that a schedule can start from.
pub(crate) fn check_base_lrs(base_lrs: &[f64]) -> Result<(), ScheduleError> {
    let check = Check("the base rates");
    check.that(!base_lrs.is_empty(), "base_lrs", "at least one rate", "none")?;
    base_lrs.iter().try_for_each(|&lr| check.factor("base_lrs", lr))
}
