//! Schedules that set an optimizer's rates.

use overdrive_core::{Entry, Optimizer, OptimizerError, StateDict, StateError, Stateful};

use crate::claim::Claim;
use crate::scheduler::MAX_SEEK;
use crate::{Plan, ScheduleError, Scheduler};

/// Runs a schedule over an optimizer's groups; their rates when it is made are the base rates.
///
/// Step it per batch or per epoch, after the optimizer's step.
///
/// ```
/// use overdrive_core::TchOptimizer;
/// use overdrive_sched::{CosineAnnealingLr, LinearLr, LrScheduler, SequentialLr};
/// use tch::nn::OptimizerConfig;
/// use tch::{Device, nn};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let vs = nn::VarStore::new(Device::Cpu);
/// let model = nn::linear(vs.root(), 4, 1, Default::default());
/// let mut opt = TchOptimizer::new(nn::Sgd::default().build(&vs, 0.1)?);
///
/// let warm_up = LinearLr::new().start_factor(0.1).total_iters(5);
/// let schedule = SequentialLr::new(warm_up).then(5, CosineAnnealingLr::new(95));
/// // tch's optimizer does not report its rate; with others, `LrScheduler::new(&mut opt, schedule)?`.
/// let mut sched = LrScheduler::with_base_lrs(&mut opt, schedule, &[0.1])?;
/// for epoch in 0..3 {
///     // .. train
///     sched.step(&mut opt)?;
/// }
/// # Ok(())
/// # }
/// ```
///
/// # Differences from PyTorch
/// The rates depend only on the step. PyTorch would multiply a rate that other code has set in between; here that is
/// [`ScheduleError::ChangedElsewhere`] (if the optimizer reports its rates). An optimizer has one schedule at a time
/// ([`ScheduleError::AlreadyScheduled`]): join several in a [`ChainedScheduler`](crate::ChainedScheduler) or a
/// [`SequentialLr`](crate::SequentialLr). A parameter group added later joins at the next [`step`](Self::step) or
/// [`apply`](Self::apply), as if it had been there from the start with its present rate as the base rate. With such a
/// group, some of PyTorch's schedules fail (`LambdaLR`, `OneCycleLR`, `SequentialLR`); others start it at its own rate
/// (`StepLR`, `ExponentialLR`, `CosineAnnealingLR`).
///
/// # Source
/// `LRScheduler`
#[doc(alias = "LRScheduler")]
#[derive(Clone, Debug)]
pub struct LrScheduler {
    claim: Claim,
    scheduler: Scheduler,
    /// Each group's rate as the optimizer reported it after the last `set`; none if it does not report rates, or
    /// nothing is set yet.
    reported: Vec<Option<f64>>,
}

impl LrScheduler {
    /// A schedule with the optimizer's present rates as base rates. Sets the schedule's first rates.
    ///
    /// # Errors
    /// When the optimizer does not report its rates or already has a schedule, an option of the schedule is out of
    /// range, or the schedule cycles a momentum that the optimizer lacks. Nothing is set then.
    ///
    /// # Syncs
    /// No.
    pub fn new(opt: &mut (impl Optimizer + ?Sized), schedule: impl Into<Plan>) -> Result<Self, ScheduleError> {
        let base_lrs = rates_of(opt)?;
        Self::with_base_lrs(opt, schedule, &base_lrs)
    }

    /// As [`new`](Self::new), with given base rates, one per group: for an optimizer that does not report its rates
    /// (tch's), or for [`layer_wise_lrs`](crate::layer_wise_lrs).
    ///
    /// # Errors
    /// Those of [`new`](Self::new), and when the number of rates is not the number of groups.
    pub fn with_base_lrs(
        opt: &mut (impl Optimizer + ?Sized),
        schedule: impl Into<Plan>,
        base_lrs: &[f64],
    ) -> Result<Self, ScheduleError> {
        check_groups(opt, base_lrs.len())?;
        let scheduler = Scheduler::new(base_lrs, schedule)?;
        let claim = Claim::of(opt)?;
        let reported = set(opt, &scheduler)?;
        Ok(Self { claim, scheduler, reported })
    }

    /// Advances one step, and sets the new rates.
    ///
    /// # Errors
    /// When this is not the schedule's optimizer, the schedule has ended or yields an invalid rate, other code has
    /// changed a rate, or the optimizer refuses one. The scheduler does not advance then.
    ///
    /// # Syncs
    /// No.
    pub fn step(&mut self, opt: &mut (impl Optimizer + ?Sized)) -> Result<(), ScheduleError> {
        self.claim.check(opt)?;
        for (group, reported) in self.reported.iter().enumerate() {
            if let (Some(expected), Some(found)) = (*reported, opt.lr(group))
                && expected != found
            {
                return Err(ScheduleError::ChangedElsewhere { group, expected, found });
            }
        }
        let next = self.joined(opt)?.stepped()?;
        self.set(opt, &next)?;
        self.scheduler = next;
        Ok(())
    }

    /// Sets this step's rates again: after loading a state, after other code has changed rates, or for an added
    /// parameter group.
    ///
    /// # Errors
    /// When this is not the schedule's optimizer, or it refuses a rate.
    ///
    /// # Syncs
    /// No.
    pub fn apply(&mut self, opt: &mut (impl Optimizer + ?Sized)) -> Result<(), ScheduleError> {
        self.claim.check(opt)?;
        let now = self.joined(opt)?;
        self.set(opt, &now)?;
        self.scheduler = now;
        Ok(())
    }

    /// The groups' rates at this step.
    ///
    /// # Source
    /// `get_last_lr`
    #[doc(alias = "get_last_lr")]
    pub fn last_lr(&self) -> &[f64] {
        self.scheduler.last_lr()
    }

    /// The number of steps so far.
    pub fn last_epoch(&self) -> u64 {
        self.scheduler.last_epoch()
    }

    /// The base rates, one per group.
    pub fn base_lrs(&self) -> &[f64] {
        self.scheduler.base_lrs()
    }

    /// The scheduler, extended by groups that the optimizer has got since, with their present rates as base rates.
    fn joined(&self, opt: &(impl Optimizer + ?Sized)) -> Result<Scheduler, ScheduleError> {
        let known = self.reported.len();
        if opt.num_groups() <= known {
            check_groups(opt, known)?;
            return Ok(self.scheduler.clone());
        }
        let mut base_lrs = self.base_lrs().to_vec();
        for group in known..opt.num_groups() {
            base_lrs.push(opt.lr(group).ok_or(ScheduleError::UnknownLr { group })?);
        }
        self.scheduler.restored(&base_lrs, self.last_epoch())
    }

    fn set(&mut self, opt: &mut (impl Optimizer + ?Sized), values: &Scheduler) -> Result<(), ScheduleError> {
        // If setting fails halfway, the next `step` must not expect the old rates.
        self.reported.fill(None);
        self.reported = set(opt, values)?;
        Ok(())
    }
}

/// The entries are `last_epoch` and `base_lrs.0`, `base_lrs.1` and so on; the rates follow from them. Loading does not
/// change the optimizer: call [`apply`](LrScheduler::apply) afterwards, or load the optimizer's state too.
impl Stateful for LrScheduler {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = StateDict::new();
        state.insert("last_epoch", Entry::Int(i64::try_from(self.last_epoch()).unwrap_or(i64::MAX)));
        insert_rates(&mut state, "base_lrs", self.base_lrs());
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let (own, saved) =
            (self.reported.len(), (0..).take_while(|n| state.get(&format!("base_lrs.{n}")).is_ok()).count());
        if saved > own {
            let expected =
                format!("{own} rates, one per group (call `apply` first for groups added to the optimizer later)");
            return Err(StateError::Mismatch { key: "base_lrs".to_owned(), expected, found: format!("{saved} rates") });
        }
        let base_lrs = rates(state, "base_lrs", own, &["last_epoch"])?;
        let step = count(state, "last_epoch", MAX_SEEK)?;
        self.scheduler = self.scheduler.restored(&base_lrs, step).map_err(|error| StateError::Mismatch {
            key: "last_epoch".to_owned(),
            expected: "a step of this schedule".to_owned(),
            found: format!("{step}: {error}"),
        })?;
        self.reported.fill(None);
        Ok(())
    }
}

/// The optimizer's rates.
pub(crate) fn rates_of(opt: &(impl Optimizer + ?Sized)) -> Result<Vec<f64>, ScheduleError> {
    (0..opt.num_groups()).map(|group| opt.lr(group).ok_or(ScheduleError::UnknownLr { group })).collect()
}

pub(crate) fn check_groups(opt: &(impl Optimizer + ?Sized), groups: usize) -> Result<(), ScheduleError> {
    let expected = format_args!("one rate for each of the optimizer's {} groups", opt.num_groups()).to_string();
    crate::error::Check("LrScheduler").that(groups == opt.num_groups(), "base_lrs", expected, groups)
}

/// Sets every group's rate and momentum, and returns the rates that the optimizer then reports.
fn set(opt: &mut (impl Optimizer + ?Sized), values: &Scheduler) -> Result<Vec<Option<f64>>, ScheduleError> {
    let lrs = values.last_lr();
    // tch's optimizer reports neither rate nor momentum, but accepts a momentum.
    let lacks = |group| values.momentum(group).is_some() && opt.momentum(group).is_none() && opt.lr(group).is_some();
    if (0..lrs.len()).any(lacks) {
        return Err(OptimizerError::NoMomentum.into());
    }
    for (group, &lr) in lrs.iter().enumerate() {
        opt.set_lr(group, lr)?;
        if let Some(momentum) = values.momentum(group) {
            opt.set_momentum(group, momentum)?;
        }
    }
    Ok((0..lrs.len()).map(|group| opt.lr(group)).collect())
}

pub(crate) fn insert_rates(state: &mut StateDict, key: &str, rates: &[f64]) {
    for (group, &rate) in rates.iter().enumerate() {
        state.insert(format!("{key}.{group}"), Entry::Float(rate));
    }
}

/// Reads one learning rate for each group, and refuses entries that are neither rates nor in `others`.
pub(crate) fn rates(state: &StateDict, key: &str, groups: usize, others: &[&str]) -> Result<Vec<f64>, StateError> {
    let keys: Vec<_> = (0..groups).map(|group| format!("{key}.{group}")).collect();
    let known: Vec<_> = keys.iter().map(String::as_str).chain(others.iter().copied()).collect();
    state.refuse_unknown(&known)?;
    let rate = |key: &String| {
        let rate = state.float(key)?;
        if crate::error::is_factor(rate) {
            return Ok(rate);
        }
        let expected = "a learning rate, finite and at least 0".to_owned();
        Err(StateError::Mismatch { key: key.clone(), expected, found: rate.to_string() })
    };
    keys.iter().map(rate).collect()
}

/// Reads a whole number from 0 to `limit`.
pub(crate) fn count(state: &StateDict, key: &str, limit: u64) -> Result<u64, StateError> {
    let found = state.int(key)?;
    u64::try_from(found).ok().filter(|count| *count <= limit).ok_or_else(|| StateError::Mismatch {
        key: key.to_owned(),
        expected: format!("from 0 to {limit}"),
        found: found.to_string(),
    })
}
