//! What a schedule is asked, and what it answers.

use std::fmt;

use crate::ScheduleError;

/// Where a schedule is asked for a value.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct At {
    /// The step (an epoch or a batch, whichever the schedule is stepped by), from 0.
    pub step: u64,
    /// The parameter group.
    pub group: usize,
    /// The group's rate that the schedule is over.
    pub base_lr: f64,
    /// The group's rate until now: what the step before left, or an earlier schedule in the same chain.
    pub lr: f64,
    /// Whether this is the value that training begins with, when nothing has been stepped yet.
    pub initial: bool,
}

/// What a schedule may change of a group before its first value: PyTorch's entries of the same names.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Group {
    /// The learning rate.
    pub lr: f64,
    /// The rate that schedules are over; the first schedule takes it from `lr`.
    pub initial_lr: Option<f64>,
    /// The momentum, once a schedule moves it.
    pub momentum: Option<f64>,
}

/// A learning rate as a function of the step.
///
/// A plain value: it holds options, never where training is. A rate may build on the one before it, so that chained
/// schedules multiply as in PyTorch; the steps from 0 on always give the same rates, and so the step is all the state
/// that there is. Write one of your own by giving `lr`.
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
    /// The schedule's name, for messages.
    fn name(&self) -> &'static str;

    /// The group's rate at a step.
    fn lr(&self, at: &At) -> f64;

    /// The rate where a [`SequentialLr`](crate::SequentialLr) begins this schedule: what step 0 is over the base rate.
    fn restart(&self, at: &At) -> f64 {
        self.lr(at)
    }

    /// The group's momentum at a step, of schedules that move it.
    fn momentum(&self, _at: &At) -> Option<f64> {
        None
    }

    /// What the schedule sets of a group before its first value.
    fn prepare(&self, _index: usize, _group: &mut Group) {}

    /// The group's base rate, of schedules that bring their own.
    fn base_lr(&self, _index: usize) -> Option<f64> {
        None
    }

    /// The last step that there is, of schedules that end.
    fn last_step(&self) -> Option<u64> {
        None
    }

    /// An error when the options cannot be used with that many groups.
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
    /// A group's value; NaN for a group that there is none for.
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
