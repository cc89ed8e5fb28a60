//! Runs a plan: the present step and the groups' rates.

use crate::error::{check_base_lrs, is_factor};
use crate::node::Node;
use crate::{Group, Plan, ScheduleError};

/// The largest step that [`Scheduler::seek`] or loading a state can jump to.
///
/// Rates depend on the previous ones, so a jump replays all steps: about ten seconds for this many, in a release build.
pub const MAX_SEEK: u64 = 100_000_000;

/// Runs a schedule over plain rates, one per group, without an optimizer and without libtorch.
///
/// ```
/// use overdrive_sched::{CosineAnnealingLr, Scheduler};
///
/// let mut sched = Scheduler::new(&[0.1, 0.01], CosineAnnealingLr::new(10).eta_min(1e-3))?;
/// sched.step()?;
/// let rates = sched.last_lr().to_vec();
///
/// // The step is the whole state.
/// let mut resumed = Scheduler::new(&[0.1, 0.01], CosineAnnealingLr::new(10).eta_min(1e-3))?;
/// resumed.seek(1)?;
/// assert_eq!(resumed.last_lr(), rates);
/// # Ok::<(), overdrive_sched::ScheduleError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Scheduler {
    plan: Plan,
    base_lrs: Vec<f64>,
    now: Now,
}

#[derive(Clone, Debug)]
struct Now {
    step: u64,
    node: Node,
    groups: Vec<Group>,
    lrs: Vec<f64>,
}

impl Scheduler {
    /// A schedule with one base rate for each group, at step 0.
    ///
    /// # Errors
    /// When there is no base rate, one is negative or not finite, an option of the schedule is out of range, or its
    /// first value is not a valid learning rate.
    pub fn new(base_lrs: &[f64], schedule: impl Into<Plan>) -> Result<Self, ScheduleError> {
        let (plan, base_lrs) = (schedule.into(), base_lrs.to_vec());
        check_base_lrs(&base_lrs)?;
        plan.check(base_lrs.len())?;
        let now = Now::start(&plan, &base_lrs)?;
        Ok(Self { plan, base_lrs, now })
    }

    /// Advances one step, and returns the new rates.
    ///
    /// # Errors
    /// When the schedule has ended, or yields an invalid learning rate or momentum. The scheduler does not advance
    /// then.
    pub fn step(&mut self) -> Result<&[f64], ScheduleError> {
        self.now = self.next()?;
        Ok(&self.now.lrs)
    }

    /// Jumps to a step by replaying all steps from 0: use it to resume a run.
    ///
    /// # Errors
    /// Those of [`step`](Self::step), and for a step above [`MAX_SEEK`]. The scheduler is unchanged then.
    pub fn seek(&mut self, step: u64) -> Result<&[f64], ScheduleError> {
        if step > MAX_SEEK {
            return Err(ScheduleError::TooFar { found: step, limit: MAX_SEEK });
        }
        let mut now = Now::start(&self.plan, &self.base_lrs)?;
        while now.step < step {
            now.advance()?;
        }
        self.now = now;
        Ok(&self.now.lrs)
    }

    /// The groups' rates at this step.
    ///
    /// # Source
    /// `get_last_lr`
    #[doc(alias = "get_last_lr")]
    pub fn last_lr(&self) -> &[f64] {
        &self.now.lrs
    }

    /// The number of steps so far.
    pub fn last_epoch(&self) -> u64 {
        self.now.step
    }

    /// The base rates, one per group.
    pub fn base_lrs(&self) -> &[f64] {
        &self.base_lrs
    }

    /// A group's momentum at this step; none if the schedule does not cycle it.
    pub fn momentum(&self, group: usize) -> Option<f64> {
        self.now.groups.get(group)?.momentum
    }

    /// A copy, advanced by one step.
    #[cfg(feature = "torch")]
    pub(crate) fn stepped(&self) -> Result<Self, ScheduleError> {
        Ok(Self { plan: self.plan.clone(), base_lrs: self.base_lrs.clone(), now: self.next()? })
    }

    /// The same plan with other base rates, replayed to a step.
    #[cfg(feature = "torch")]
    pub(crate) fn restored(&self, base_lrs: &[f64], step: u64) -> Result<Self, ScheduleError> {
        let mut restored = Self::new(base_lrs, self.plan.clone())?;
        restored.seek(step)?;
        Ok(restored)
    }

    fn next(&self) -> Result<Now, ScheduleError> {
        let mut next = self.now.clone();
        next.advance()?;
        Ok(next)
    }
}

impl Now {
    fn start(plan: &Plan, base_lrs: &[f64]) -> Result<Self, ScheduleError> {
        let group = |&lr: &f64| Group { lr, initial_lr: None, momentum: None };
        let mut groups: Vec<_> = base_lrs.iter().map(group).collect();
        let mut node = plan.0.clone();
        node.construct(&mut groups)?;
        let mut now = Self { step: 0, node, groups, lrs: base_lrs.to_vec() };
        now.take_rates()?;
        Ok(now)
    }

    fn advance(&mut self) -> Result<(), ScheduleError> {
        self.step += 1;
        self.node.step(&mut self.groups)?;
        self.take_rates()
    }

    /// Checks the groups' rates and momenta, and takes over the rates.
    fn take_rates(&mut self) -> Result<(), ScheduleError> {
        let step = self.step;
        for (group, (values, lr)) in self.groups.iter().zip(&mut self.lrs).enumerate() {
            let refuse =
                |what, expected, found| Err(ScheduleError::InvalidValue { step, group, what, expected, found });
            // PyTorch's recursions can round to slightly below zero, at the end of a line to zero say.
            let tolerance = 1e-9 * values.initial_lr.unwrap_or(0.0).max(*lr);
            let next_lr = if (-tolerance..0.0).contains(&values.lr) { 0.0 } else { values.lr };
            if !is_factor(next_lr) {
                return refuse("learning rate", "finite and at least 0", next_lr);
            }
            if let Some(momentum) = values.momentum.filter(|momentum| !(0.0..1.0).contains(momentum)) {
                return refuse("momentum", "at least 0 and below 1", momentum);
            }
            *lr = next_lr;
        }
        Ok(())
    }
}
