//! A schedule that sets an optimizer's rates.

use overdrive_core::{Entry, Optimizer, OptimizerError, StateDict, StateError, Stateful};

use crate::claim::Claim;
use crate::scheduler::MAX_SEEK;
use crate::{Plan, ScheduleError, Scheduler};

/// Runs a schedule over an optimizer's groups, with their rates (and momenta) as it finds them for base rates.
///
/// Step it by the batch or by the epoch, behind the optimizer's step.
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
/// // tch's optimizer does not tell its rate; with another, `LrScheduler::new(&mut opt, schedule)?`.
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
/// The rates come from the step alone. A rate that something else has set in between is not multiplied but is
/// [`ScheduleError::ChangedElsewhere`] (where the optimizer tells its rates). An optimizer has one schedule at a time
/// ([`ScheduleError::AlreadyScheduled`]): several are a [`ChainedScheduler`](crate::ChainedScheduler), or a
/// [`SequentialLr`](crate::SequentialLr). A parameter group that the optimizer gets later joins with the next
/// [`step`](Self::step) or [`apply`](Self::apply), as if it had been there from the start with the rate that it has then.
/// Of PyTorch's, some stop with an error (`LambdaLR`, `OneCycleLR`, `SequentialLR`), and others let the new group begin at
/// its own rate (`StepLR`, `ExponentialLR`, `CosineAnnealingLR`).
///
/// # Source
/// `LRScheduler`
#[doc(alias = "LRScheduler")]
#[derive(Clone, Debug)]
pub struct LrScheduler {
    claim: Claim,
    scheduler: Scheduler,
    /// What the optimizer said of each group's rate when it had been set; none where it does not tell, or nothing is
    /// set yet.
    told: Vec<Option<f64>>,
}

impl LrScheduler {
    /// A schedule over the rates that the optimizer has now, and sets the schedule's first ones.
    ///
    /// # Errors
    /// When the optimizer does not tell its rates, an option of the schedule cannot be used, or the schedule moves a
    /// momentum and the optimizer has none, or the optimizer has a schedule. Nothing is set then.
    ///
    /// # Syncs
    /// No.
    pub fn new(opt: &mut (impl Optimizer + ?Sized), schedule: impl Into<Plan>) -> Result<Self, ScheduleError> {
        let base_lrs = rates_of(opt)?;
        Self::with_base_lrs(opt, schedule, &base_lrs)
    }

    /// The same over base rates of your own, one a group: for an optimizer that does not tell its rates (tch's), or for
    /// [`layer_wise_lrs`](crate::layer_wise_lrs).
    ///
    /// # Errors
    /// As [`new`](Self::new), and when there is not one rate for each group.
    pub fn with_base_lrs(
        opt: &mut (impl Optimizer + ?Sized),
        schedule: impl Into<Plan>,
        base_lrs: &[f64],
    ) -> Result<Self, ScheduleError> {
        check_groups(opt, base_lrs.len())?;
        let scheduler = Scheduler::new(base_lrs, schedule)?;
        let claim = Claim::of(opt)?;
        let told = set(opt, &scheduler)?;
        Ok(Self { claim, scheduler, told })
    }

    /// One step on; sets the rates that hold from here.
    ///
    /// # Errors
    /// When the optimizer is another one, the schedule has ended or comes to a value that is no learning rate, when
    /// something else has changed a rate, and when the optimizer refuses. The scheduler then stays where it was.
    ///
    /// # Syncs
    /// No.
    pub fn step(&mut self, opt: &mut (impl Optimizer + ?Sized)) -> Result<(), ScheduleError> {
        self.claim.check(opt)?;
        for (group, told) in self.told.iter().enumerate() {
            if let (Some(expected), Some(found)) = (*told, opt.lr(group))
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

    /// Sets the rates of this step again: after loading a state, where something else has changed them, or for a parameter
    /// group that has been added.
    ///
    /// # Errors
    /// When the optimizer is another one, or refuses.
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

    /// How often it was stepped.
    pub fn last_epoch(&self) -> u64 {
        self.scheduler.last_epoch()
    }

    /// The rates that the schedule is over.
    pub fn base_lrs(&self) -> &[f64] {
        self.scheduler.base_lrs()
    }

    /// With the groups that the optimizer has got since, over the rates that they have now.
    fn joined(&self, opt: &(impl Optimizer + ?Sized)) -> Result<Scheduler, ScheduleError> {
        let known = self.told.len();
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
        // Until all are set, nobody knows what to expect.
        self.told.fill(None);
        self.told = set(opt, values)?;
        Ok(())
    }
}

/// The entries are `last_epoch` and `base_lrs.0`, `base_lrs.1` and so on; the rates come of them. Loading sets nothing
/// of the optimizer: call [`apply`](LrScheduler::apply) behind it, or load the optimizer's state too.
impl Stateful for LrScheduler {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        let mut state = StateDict::new();
        state.insert("last_epoch", Entry::Int(i64::try_from(self.last_epoch()).unwrap_or(i64::MAX)));
        insert_rates(&mut state, "base_lrs", self.base_lrs());
        Ok(state)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        let (own, saved) = (self.told.len(), (0..).take_while(|n| state.get(&format!("base_lrs.{n}")).is_ok()).count());
        if saved > own {
            let expected =
                format!("{own} rates, one a group (`apply` takes in groups that the optimizer has got since)");
            return Err(StateError::Mismatch { key: "base_lrs".to_owned(), expected, found: format!("{saved} rates") });
        }
        let base_lrs = rates(state, "base_lrs", own, &["last_epoch"])?;
        let step = count(state, "last_epoch", MAX_SEEK)?;
        self.scheduler = self.scheduler.restored(&base_lrs, step).map_err(|error| StateError::Mismatch {
            key: "last_epoch".to_owned(),
            expected: "a step of this schedule".to_owned(),
            found: format!("{step}: {error}"),
        })?;
        self.told.fill(None);
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

/// Sets every group's rate and momentum, and returns what the optimizer tells of the rates afterwards.
fn set(opt: &mut (impl Optimizer + ?Sized), values: &Scheduler) -> Result<Vec<Option<f64>>, ScheduleError> {
    let lrs = values.last_lr();
    // tch's optimizer tells neither, but takes a momentum.
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

/// One learning rate for each group, and no entry that is neither one nor among `others`.
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

/// A whole number from 0 to `limit`.
pub(crate) fn count(state: &StateDict, key: &str, limit: u64) -> Result<u64, StateError> {
    let found = state.int(key)?;
    u64::try_from(found).ok().filter(|count| *count <= limit).ok_or_else(|| StateError::Mismatch {
        key: key.to_owned(),
        expected: format!("from 0 to {limit}"),
        found: found.to_string(),
    })
}
