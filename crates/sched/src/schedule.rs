//! The interface of a schedule.

use std::fmt;

use crate::ScheduleError;

/// The position at which a schedule computes a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct At {
    /// The step (epoch or batch, depending on how the schedule is stepped), from 0.
    pub step: u64,
    /// The parameter group.
    pub group: usize,
    /// The group's base rate.
    pub base_lr: f64,
    /// The group's rate so far: from the previous step, or from an earlier schedule in the same chain.
    pub lr: f64,
    /// Whether this is the value before the first step of training.
    pub initial: bool,
}

/// The values of a group that a schedule may change before its first value: PyTorch's entries of the same names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group {
    /// The learning rate.
    pub lr: f64,
    /// The base rate of schedules; the first schedule takes it from `lr`.
    pub initial_lr: Option<f64>,
    /// The momentum, once a schedule cycles it.
    pub momentum: Option<f64>,
}

/// A learning rate as a function of the step.
///
/// A plain value: it holds options and no position. A rate may depend on the previous one, so that chained schedules
/// multiply as in PyTorch. Stepping from 0 always gives the same rates, so the step is the only state. To write your
/// own, implement `name` and `lr`.
///
/// ```
/// use overdrive_sched::{At, Schedule, Scheduler};
///
/// /// Half the rate on every other step.
/// #[derive(Debug)]
/// struct Stutter;
///
/// impl Schedule for Stutter {
///     fn name(&self) -> &'static str {
///         "Stutter"
///     }
///
///     fn lr(&self, at: &At) -> f64 {
///         if at.step % 2 == 0 { at.base_lr } else { at.base_lr / 2.0 }
///     }
/// }
///
/// let mut sched = Scheduler::new(&[0.1], Stutter)?;
/// sched.step()?;
/// assert_eq!(sched.last_lr(), [0.05]);
/// # Ok::<(), overdrive_sched::ScheduleError>(())
/// ```
///
/// # Source
/// `LRScheduler`, whose `get_lr` is [`lr`](Self::lr).
#[doc(alias = "LRScheduler")]
pub trait Schedule: fmt::Debug + Send + Sync {
    /// The schedule's name, for error messages.
    fn name(&self) -> &'static str;

    /// The group's rate at a step.
    fn lr(&self, at: &At) -> f64;

    /// The rate when a [`SequentialLr`](crate::SequentialLr) switches to this schedule: step 0, computed from the base
    /// rate.
    fn restart(&self, at: &At) -> f64 {
        self.lr(at)
    }

    /// The group's momentum at a step, for schedules that cycle it.
    fn momentum(&self, _at: &At) -> Option<f64> {
        None
    }

    /// Sets values of a group before the schedule's first value.
    fn prepare(&self, _index: usize, _group: &mut Group) {}

    /// The group's base rate, for schedules that set their own.
    fn base_lr(&self, _index: usize) -> Option<f64> {
        None
    }

    /// The last step, for schedules that end.
    fn last_step(&self) -> Option<u64> {
        None
    }

    /// An error if an option is out of range or does not fit this number of groups.
    ///
    /// # Errors
    /// [`ScheduleError::InvalidOption`]
    fn check(&self, _groups: usize) -> Result<(), ScheduleError> {
        Ok(())
    }
}

/// An option with one value for all groups, or one for each.
#[derive(Clone, Debug, PartialEq)]
pub enum PerGroup {
    /// The same for all.
    All(f64),
    /// One for each, in order.
    Each(Vec<f64>),
}

impl PerGroup {
    /// A group's value; NaN if there is none for this group.
    pub fn get(&self, group: usize) -> f64 {
        match self {
            Self::All(value) => *value,
            Self::Each(values) => values.get(group).copied().unwrap_or(f64::NAN),
        }
    }
}

impl From<f64> for PerGroup {
    fn from(value: f64) -> Self {
        Self::All(value)
    }
}

impl From<Vec<f64>> for PerGroup {
    fn from(values: Vec<f64>) -> Self {
        Self::Each(values)
    }
}

impl<const N: usize> From<[f64; N]> for PerGroup {
    fn from(values: [f64; N]) -> Self {
        Self::Each(values.into())
    }
}
