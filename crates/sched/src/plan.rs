//! Schedules joined into one: after one another, or multiplied.

use std::sync::Arc;

use crate::node::Node;
use crate::{Schedule, ScheduleError};

/// A schedule, single or joined from several: what a scheduler runs.
///
/// Any [`Schedule`], a [`SequentialLr`] and a [`ChainedScheduler`] are turned into one where they are taken.
#[derive(Clone, Debug)]
pub struct Plan(pub(crate) Node);

impl<S: Schedule + 'static> From<S> for Plan {
    fn from(schedule: S) -> Self {
        Self(Node::single(Arc::new(schedule)))
    }
}

/// Schedules after one another, each from its own step 0.
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
/// A [`SequentialLr`] or [`ChainedScheduler`] may be a part. As the first part it has PyTorch's values, which are a
/// step ahead of what one expects: PyTorch steps it once while it is built. As a later part, where PyTorch raises
/// `NotImplementedError`, it begins at its milestone as it would by itself.
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
    /// Begins with `first`.
    pub fn new(first: impl Into<Plan>) -> Self {
        Self { parts: vec![first.into().0], milestones: Vec::new() }
    }

    /// Goes on with `next` from the step `milestone` on, which should be above the milestone before it.
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

/// Schedules that step together, each on the rate that the one before it left.
///
/// Those that scale the rate (by a step, a factor, a cosine) multiply. Those that compute it from the base rate alone
/// (`LambdaLr`, `CosineAnnealingWarmRestarts`, `CyclicLr`, `OneCycleLr`, and those that PyTorch has not) pass over
/// what came before them, as in PyTorch.
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
    /// Begins with `first`.
    pub fn new(first: impl Into<Plan>) -> Self {
        Self { parts: vec![first.into().0] }
    }

    /// Steps `next` behind those before it.
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
    /// An error when an option of any part cannot be used with that many groups.
    ///
    /// # Errors
    /// [`ScheduleError::InvalidOption`], [`ScheduleError::InvalidPart`]
    pub fn check(&self, groups: usize) -> Result<(), ScheduleError> {
        self.0.check(groups)
    }
}
