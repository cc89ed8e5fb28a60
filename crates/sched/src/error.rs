//! The errors of schedules.

use std::fmt::Display;

use crate::PerGroup;

/// Why a schedule refused or failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ScheduleError {
    /// An option outside its range.
    #[error("{schedule}: `{option}` should be {expected}, but is {found}")]
    InvalidOption {
        /// The schedule that has the option.
        schedule: &'static str,
        /// The option's name.
        option: &'static str,
        /// The values allowed.
        expected: String,
        /// The value given.
        found: String,
    },
    /// A schedule within another one has an option outside its range.
    #[error("part {part} of {schedule}: {error}")]
    InvalidPart {
        /// The schedule that contains the part.
        schedule: &'static str,
        /// The part's index, from 0.
        part: usize,
        /// The part's error.
        error: Box<ScheduleError>,
    },
    /// A schedule yields an invalid learning rate or momentum.
    #[error("at step {step} the {what} of group {group} would be {found}, but should be {expected}")]
    InvalidValue {
        /// The step.
        step: u64,
        /// The parameter group.
        group: usize,
        /// "learning rate" or "momentum".
        what: &'static str,
        /// The values allowed.
        expected: &'static str,
        /// The schedule's value.
        found: f64,
    },
    /// A step after a schedule's last.
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
        /// The largest step allowed.
        limit: u64,
    },
    /// An optimizer that does not report its learning rates (tch's).
    #[error(
        "the optimizer does not report group {group}'s learning rate: pass the rates to `with_base_lrs` (a plateau's: \
         to `build`)"
    )]
    UnknownLr {
        /// The parameter group.
        group: usize,
    },
    /// A learning rate that other code has set since the last step.
    #[error(
        "group {group}'s learning rate is {found}, but this schedule had set {expected}: join schedules with \
         ChainedScheduler, or call `apply` first to set the schedule's rates again"
    )]
    ChangedElsewhere {
        /// The parameter group.
        group: usize,
        /// The rate that the schedule had set.
        expected: f64,
        /// The optimizer's rate.
        found: f64,
    },
    /// Two schedules for one optimizer.
    #[error(
        "this optimizer has a schedule already: join schedules with ChainedScheduler or SequentialLr, or drop the \
         other one first"
    )]
    AlreadyScheduled,
    /// A schedule was stepped with another optimizer than the one it was made for.
    #[error("this schedule was made for another optimizer: step it with that one, or make a new schedule for this one")]
    OtherOptimizer,
    /// The optimizer refused a rate, or has no momentum to cycle.
    #[cfg(feature = "torch")]
    #[error(transparent)]
    Optimizer(#[from] overdrive_core::OptimizerError),
    /// A state could not be saved or restored.
    #[cfg(feature = "torch")]
    #[error(transparent)]
    State(#[from] overdrive_core::StateError),
    /// libtorch failed.
    #[cfg(feature = "torch")]
    #[error(transparent)]
    Torch(#[from] overdrive_core::TorchError),
}

/// Checks the options of the schedule with this name.
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

    /// Checks a learning rate, or a factor that it is multiplied by.
    pub fn factor(self, option: &'static str, found: f64) -> Result<(), ScheduleError> {
        self.that(is_factor(found), option, "finite and at least 0", found)
    }

    pub fn fraction(self, option: &'static str, found: f64) -> Result<(), ScheduleError> {
        self.that((0.0..=1.0).contains(&found), option, "from 0 to 1", found)
    }

    pub fn positive_fraction(self, option: &'static str, found: f64) -> Result<(), ScheduleError> {
        self.that(found > 0.0 && found <= 1.0, option, "above 0 and at most 1", found)
    }

    pub fn positive(self, option: &'static str, found: f64) -> Result<(), ScheduleError> {
        self.that(found > 0.0 && found.is_finite(), option, "finite and above 0", found)
    }

    /// Checks that there is one value, or one for each group; checks each value with `check`.
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

/// Whether a number is finite and not negative (NaN is not).
pub(crate) fn is_factor(value: f64) -> bool {
    (0.0..f64::INFINITY).contains(&value)
}

/// Checks the base rates of a schedule.
pub(crate) fn check_base_lrs(base_lrs: &[f64]) -> Result<(), ScheduleError> {
    let check = Check("the base rates");
    check.that(!base_lrs.is_empty(), "base_lrs", "at least one rate", "none")?;
    base_lrs.iter().try_for_each(|&lr| check.factor("base_lrs", lr))
}
