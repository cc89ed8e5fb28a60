//! Schedules joined into one: one after the other, or multiplied.

use std::sync::Arc;

use crate::node::Node;
use crate::{Schedule, ScheduleError};

/// The schedule that a scheduler runs: a single one, or several joined.
///
/// Any [`Schedule`], a [`SequentialLr`] and a [`ChainedScheduler`] convert into it.
#[derive(Clone, Debug)]
pub struct Plan(pub(crate) Node);

impl<S: Schedule + 'static> From<S> for Plan {
    fn from(schedule: S) -> Self {
        Self(Node::single(Arc::new(schedule)))
    }
}

/// Schedules one after the other, each from its own step 0.
///
/// ```
/// use overdrive_sched::{ExponentialLr, LinearLr, Scheduler, SequentialLr};
///
/// let warm_up_and_decay = SequentialLr::new(LinearLr::new().start_factor(0.1)).then(5, ExponentialLr::new(0.9));
/// let mut sched = Scheduler::new(&[1.0], warm_up_and_decay)?;
/// assert_eq!(sched.last_lr(), [0.1]);
/// sched.seek(6)?;
/// assert_eq!(sched.last_lr(), [0.9]);
/// # Ok::<(), overdrive_sched::ScheduleError>(())
/// ```
///
/// A part may be a [`SequentialLr`] or [`ChainedScheduler`]. As the first part it has PyTorch's values, which are one
/// step ahead of the expected ones: PyTorch steps it once while it is built. As a later part, where PyTorch raises
/// `NotImplementedError`, it starts at its milestone as it would on its own.
///
/// # Source
/// `SequentialLR`
#[doc(alias = "SequentialLR")]
#[derive(Clone, Debug)]
#[must_use = "a schedule does nothing until a scheduler runs it"]
pub struct SequentialLr {
    parts: Vec<Node>,
    milestones: Vec<u64>,
}

impl SequentialLr {
    /// Starts with `first`.
    pub fn new(first: impl Into<Plan>) -> Self {
        Self { parts: vec![first.into().0], milestones: Vec::new() }
    }

    /// Continues with `next` from the step `milestone`, which should be above the previous milestone.
    pub fn then(mut self, milestone: u64, next: impl Into<Plan>) -> Self {
        self.milestones.push(milestone);
        self.parts.push(next.into().0);
        self
    }
}

impl From<SequentialLr> for Plan {
    fn from(sequential: SequentialLr) -> Self {
        let SequentialLr { parts, milestones } = sequential;
        Self(Node::Sequential { parts, milestones, last_epoch: 0 })
    }
}

/// Schedules that step together, each starting from the rate that the previous one has computed.
///
/// Schedules that scale the rate (by a step, a factor, a cosine) multiply. Schedules that compute it from the base rate
/// (`LambdaLr`, `CosineAnnealingWarmRestarts`, `CyclicLr`, `OneCycleLr`, and those that PyTorch lacks) override the
/// previous ones, as in PyTorch.
///
/// ```
/// use overdrive_sched::{ChainedScheduler, ConstantLr, ExponentialLr, Scheduler};
///
/// let chained = ChainedScheduler::new(ConstantLr::new().factor(0.5).total_iters(2)).and(ExponentialLr::new(0.5));
/// let mut sched = Scheduler::new(&[1.0], chained)?;
/// assert_eq!(sched.last_lr(), [0.5]);
/// sched.seek(2)?;
/// assert_eq!(sched.last_lr(), [0.25]);
/// # Ok::<(), overdrive_sched::ScheduleError>(())
/// ```
///
/// # Source
/// `ChainedScheduler`
#[derive(Clone, Debug)]
#[must_use = "a schedule does nothing until a scheduler runs it"]
pub struct ChainedScheduler {
    parts: Vec<Node>,
}

impl ChainedScheduler {
    /// Starts with `first`.
    pub fn new(first: impl Into<Plan>) -> Self {
        Self { parts: vec![first.into().0] }
    }

    /// Adds `next`, which is stepped after the previous ones.
    pub fn and(mut self, next: impl Into<Plan>) -> Self {
        self.parts.push(next.into().0);
        self
    }
}

impl From<ChainedScheduler> for Plan {
    fn from(chained: ChainedScheduler) -> Self {
        Self(Node::Chained { parts: chained.parts })
    }
}

impl Plan {
    /// An error if an option of any part is out of range or does not fit this number of groups.
    ///
    /// # Errors
    /// [`ScheduleError::InvalidOption`], [`ScheduleError::InvalidPart`]
    pub fn check(&self, groups: usize) -> Result<(), ScheduleError> {
        self.0.check(groups)
    }
}
