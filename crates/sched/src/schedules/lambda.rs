//! Factors computed by a function of the step.

use std::fmt;
use std::sync::Arc;

use crate::error::Check;
use crate::{At, Schedule, ScheduleError};

/// A function from the step to a factor.
pub type FactorFn = Arc<dyn Fn(u64) -> f64 + Send + Sync>;

/// One function for all groups, or one for each.
#[derive(Clone)]
enum Factors {
    All(FactorFn),
    Each(Vec<FactorFn>),
}

impl Factors {
    /// The factor; NaN if there is no function for this group.
    fn at(&self, at: &At) -> f64 {
        let factor = match self {
            Self::All(factor) => Some(factor),
            Self::Each(factors) => factors.get(at.group),
        };
        factor.map_or(f64::NAN, |factor| factor(at.step))
    }

    fn check(&self, name: &'static str, groups: usize) -> Result<(), ScheduleError> {
        let Self::Each(factors) = self else { return Ok(()) };
        let expected = format_args!("one function, or one for each of {groups} groups").to_string();
        Check(name).that(factors.len() == groups, "lr_lambda", expected, format_args!("{} functions", factors.len()))
    }
}

/// The base rate times a function of the step.
///
/// ```
/// use overdrive_sched::{LambdaLr, Scheduler};
///
/// let mut sched = Scheduler::new(&[0.1], LambdaLr::new(|step| 0.5f64.powi(step as i32 / 10)))?;
/// sched.seek(10)?;
/// assert_eq!(sched.last_lr(), [0.05]);
/// # Ok::<(), overdrive_sched::ScheduleError>(())
/// ```
///
/// # Source
/// `LambdaLR`
#[doc(alias = "LambdaLR")]
#[derive(Clone)]
pub struct LambdaLr(Factors);

impl LambdaLr {
    /// One function for all groups.
    pub fn new(lr_lambda: impl Fn(u64) -> f64 + Send + Sync + 'static) -> Self {
        Self(Factors::All(Arc::new(lr_lambda)))
    }

    /// One function for each group.
    pub fn per_group(lr_lambdas: impl IntoIterator<Item = FactorFn>) -> Self {
        Self(Factors::Each(lr_lambdas.into_iter().collect()))
    }
}

impl Schedule for LambdaLr {
    fn name(&self) -> &'static str {
        "LambdaLr"
    }

    fn lr(&self, at: &At) -> f64 {
        at.base_lr * self.0.at(at)
    }

    fn check(&self, groups: usize) -> Result<(), ScheduleError> {
        self.0.check(self.name(), groups)
    }
}

/// The previous rate times a function of the step; the first rate is the base rate.
///
/// # Source
/// `MultiplicativeLR`
#[doc(alias = "MultiplicativeLR")]
#[derive(Clone)]
pub struct MultiplicativeLr(Factors);

impl MultiplicativeLr {
    /// One function for all groups.
    pub fn new(lr_lambda: impl Fn(u64) -> f64 + Send + Sync + 'static) -> Self {
        Self(Factors::All(Arc::new(lr_lambda)))
    }

    /// One function for each group.
    pub fn per_group(lr_lambdas: impl IntoIterator<Item = FactorFn>) -> Self {
        Self(Factors::Each(lr_lambdas.into_iter().collect()))
    }
}

/// At its start in a sequence it multiplies the present rate, not the base rate, like PyTorch's.
impl Schedule for MultiplicativeLr {
    fn name(&self) -> &'static str {
        "MultiplicativeLr"
    }

    fn lr(&self, at: &At) -> f64 {
        if at.initial { at.lr } else { at.lr * self.0.at(at) }
    }

    fn check(&self, groups: usize) -> Result<(), ScheduleError> {
        self.0.check(self.name(), groups)
    }
}

impl fmt::Debug for LambdaLr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LambdaLr").finish_non_exhaustive()
    }
}

impl fmt::Debug for MultiplicativeLr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MultiplicativeLr").finish_non_exhaustive()
    }
}
