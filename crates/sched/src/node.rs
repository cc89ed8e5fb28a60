//! The position of each schedule of a plan, and how schedules change the groups' rates.
//!
//! The order of operations is PyTorch's, also in the constructors: their first steps change the rates that the next
//! schedule is built on. That is why a plan is stepped and not computed in closed form: it gives nested schedules
//! PyTorch's values.

use std::sync::Arc;

use crate::error::Check;
use crate::{At, Group, Schedule, ScheduleError};

/// A schedule and its position.
#[derive(Clone, Debug)]
pub(crate) enum Node {
    Single {
        schedule: Arc<dyn Schedule>,
        base_lrs: Vec<f64>,
        /// -1 before the first value.
        last_epoch: i64,
    },
    Sequential {
        parts: Vec<Node>,
        milestones: Vec<u64>,
        last_epoch: u64,
    },
    Chained {
        parts: Vec<Node>,
    },
}

/// Which of a schedule's values to set.
#[derive(Clone, Copy, PartialEq)]
enum Value {
    Initial,
    Next,
    Restart,
}

impl Node {
    pub fn single(schedule: Arc<dyn Schedule>) -> Self {
        Self::Single { schedule, base_lrs: Vec::new(), last_epoch: -1 }
    }

    pub fn check(&self, groups: usize) -> Result<(), ScheduleError> {
        let (name, parts) = match self {
            Self::Single { schedule, .. } => return schedule.check(groups),
            Self::Sequential { parts, milestones, .. } => {
                let rise = milestones.windows(2).all(|pair| pair[0] < pair[1]);
                let holds = rise && milestones.first() != Some(&0);
                let expected = "steps of at least 1, each above the one before";
                Check("SequentialLr").that(holds, "milestones", expected, format_args!("{milestones:?}"))?;
                ("SequentialLr", parts)
            }
            Self::Chained { parts } => ("ChainedScheduler", parts),
        };
        parts.iter().enumerate().try_for_each(|(part, node)| {
            let named = |error| ScheduleError::InvalidPart { schedule: name, part, error: Box::new(error) };
            node.check(groups).map_err(named)
        })
    }

    /// Does what PyTorch's constructors do: first those of the parts, then that of the whole.
    pub fn construct(&mut self, groups: &mut [Group]) -> Result<(), ScheduleError> {
        match self {
            Self::Single { schedule, base_lrs, last_epoch } => {
                for (index, group) in groups.iter_mut().enumerate() {
                    schedule.prepare(index, group);
                }
                *base_lrs = groups.iter_mut().map(|group| *group.initial_lr.get_or_insert(group.lr)).collect();
                *last_epoch = -1;
                self.first_value(groups)?;
                self.take_own_base_lrs();
                Ok(())
            }
            Self::Sequential { parts, last_epoch, .. } => {
                parts.iter_mut().try_for_each(|part| part.construct(groups))?;
                *last_epoch = 0;
                to_initial_lrs(groups);
                parts.iter_mut().for_each(Self::undo);
                first(parts).map_or(Ok(()), |part| part.first_value(groups))
            }
            Self::Chained { parts } => parts.iter_mut().try_for_each(|part| part.construct(groups)),
        }
    }

    /// Sets the base rates to the schedule's own, if it has any. As in PyTorch, this comes after the first value, which
    /// is computed from the group's rate.
    fn take_own_base_lrs(&mut self) {
        if let Self::Single { schedule, base_lrs, .. } = self {
            for (index, base_lr) in base_lrs.iter_mut().enumerate() {
                *base_lr = schedule.base_lr(index).unwrap_or(*base_lr);
            }
        }
    }

    /// Takes each single schedule one step back; PyTorch's `recursive_undo`, which does not change a nested sequence's
    /// own count.
    fn undo(&mut self) {
        match self {
            Self::Single { last_epoch, .. } => *last_epoch -= 1,
            Self::Sequential { parts, .. } | Self::Chained { parts } => parts.iter_mut().for_each(Self::undo),
        }
    }

    /// PyTorch's `_initial_step`: a single schedule sets its initial value; a sequence or chain makes an ordinary step.
    fn first_value(&mut self, groups: &mut [Group]) -> Result<(), ScheduleError> {
        match self {
            Self::Single { last_epoch, .. } => {
                *last_epoch += 1;
                self.set(groups, Value::Initial)
            }
            Self::Sequential { .. } | Self::Chained { .. } => self.step(groups),
        }
    }

    /// Advances every group's rate by one step.
    pub fn step(&mut self, groups: &mut [Group]) -> Result<(), ScheduleError> {
        match self {
            Self::Single { last_epoch, .. } => {
                *last_epoch += 1;
                self.set(groups, Value::Next)
            }
            Self::Sequential { parts, milestones, last_epoch } => {
                *last_epoch += 1;
                let index = milestones.partition_point(|milestone| milestone <= last_epoch);
                let begins = index > 0 && milestones[index - 1] == *last_epoch;
                let Some(part) = parts.get_mut(index) else { return Ok(()) };
                if begins { part.restart(groups) } else { part.step(groups) }
            }
            Self::Chained { parts } => parts.iter_mut().try_for_each(|part| part.step(groups)),
        }
    }

    /// Starts a later part of a sequence.
    fn restart(&mut self, groups: &mut [Group]) -> Result<(), ScheduleError> {
        if let Self::Single { last_epoch, .. } = self {
            *last_epoch = 0;
            return self.set(groups, Value::Restart);
        }
        to_initial_lrs(groups);
        self.begin(groups)
    }

    /// Sets the first value of this schedule and its parts, from the groups' present rates.
    fn begin(&mut self, groups: &mut [Group]) -> Result<(), ScheduleError> {
        match self {
            Self::Single { last_epoch, .. } => {
                *last_epoch = 0;
                self.set(groups, Value::Initial)
            }
            Self::Sequential { parts, last_epoch, .. } => {
                *last_epoch = 0;
                first(parts).map_or(Ok(()), |part| part.begin(groups))
            }
            Self::Chained { parts } => parts.iter_mut().try_for_each(|part| part.begin(groups)),
        }
    }

    /// Sets every group's values from a single schedule.
    fn set(&self, groups: &mut [Group], value: Value) -> Result<(), ScheduleError> {
        let Self::Single { schedule, base_lrs, last_epoch } = self else { return Ok(()) };
        let step = u64::try_from(*last_epoch).unwrap_or(0);
        if let Some(last) = schedule.last_step().filter(|last| step > *last) {
            return Err(ScheduleError::Finished { schedule: schedule.name().to_owned(), last, step });
        }
        for (index, (group, base_lr)) in groups.iter_mut().zip(base_lrs).enumerate() {
            let initial = value == Value::Initial;
            let at = At { step, group: index, base_lr: *base_lr, lr: group.lr, initial };
            group.lr = if value == Value::Restart { schedule.restart(&at) } else { schedule.lr(&at) };
            group.momentum = schedule.momentum(&at).or(group.momentum);
        }
        Ok(())
    }
}

fn first(parts: &mut [Node]) -> Option<&mut Node> {
    parts.first_mut()
}

fn to_initial_lrs(groups: &mut [Group]) {
    for group in groups {
        group.lr = group.initial_lr.unwrap_or(group.lr);
    }
}
