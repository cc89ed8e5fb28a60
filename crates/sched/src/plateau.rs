//! Lowers the rate when a metric has stopped improving.

use crate::error::{Check, check_base_lrs};
use crate::{Mode, PerGroup, ScheduleError};

/// The meaning of [`ReduceLrOnPlateau`]'s threshold.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ThresholdMode {
    /// A fraction of the best metric.
    #[default]
    Rel,
    /// A difference from the best metric.
    Abs,
}

/// Lowers the rates by a factor when a metric has not improved for a while.
///
/// Unlike the other schedules, its rates follow from the metrics and not from the step. A metric of NaN is not an
/// improvement.
///
/// ```
/// use overdrive_sched::ReduceLrOnPlateau;
///
/// let mut plateau = ReduceLrOnPlateau::builder().factor(0.5).patience(1).build(&[0.1])?;
/// for loss in [1.0, 1.0, 1.0] {
///     plateau.update(loss);
/// }
/// assert_eq!(plateau.last_lr(), [0.05]);
/// # Ok::<(), overdrive_sched::ScheduleError>(())
/// ```
///
/// # Source
/// `ReduceLROnPlateau`
#[doc(alias = "ReduceLROnPlateau")]
#[derive(Clone, Debug)]
pub struct ReduceLrOnPlateau {
    options: ReduceLrOnPlateauBuilder,
    pub(crate) lrs: Vec<f64>,
    pub(crate) state: PlateauState,
    /// Keeps other schedules from setting the same optimizer's rates; `None` before the first use.
    #[cfg(feature = "torch")]
    pub(crate) claim: Option<crate::claim::Claim>,
}

/// The state of a [`ReduceLrOnPlateau`]: with the rates, all that a resumed run needs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct PlateauState {
    /// The number of metrics so far.
    pub last_epoch: u64,
    /// The best of them; infinite before the first.
    pub best: f64,
    /// The number of metrics in a row without improvement.
    pub num_bad_epochs: u64,
    /// For how many more metrics the cooldown lasts.
    pub cooldown_counter: u64,
}

/// The options of a [`ReduceLrOnPlateau`], with PyTorch's defaults.
#[derive(Clone, Debug, PartialEq)]
#[must_use = "options do nothing until `build`"]
pub struct ReduceLrOnPlateauBuilder {
    mode: Mode,
    factor: f64,
    patience: u64,
    threshold: f64,
    threshold_mode: ThresholdMode,
    cooldown: u64,
    min_lr: PerGroup,
    eps: f64,
}

impl ReduceLrOnPlateauBuilder {
    /// Whether lower or higher is better; default [`Mode::Min`].
    pub fn mode(mut self, mode: Mode) -> Self {
        self.mode = mode;
        self
    }

    /// The factor that lowers the rates, at least 0 and below 1; default 0.1.
    pub fn factor(mut self, factor: f64) -> Self {
        self.factor = factor;
        self
    }

    /// How many metrics in a row may fail to improve before the rates are lowered; default 10.
    pub fn patience(mut self, patience: u64) -> Self {
        self.patience = patience;
        self
    }

    /// How much better a metric has to be to count as an improvement; default 1e-4.
    pub fn threshold(mut self, threshold: f64) -> Self {
        self.threshold = threshold;
        self
    }

    /// The meaning of the threshold; default [`ThresholdMode::Rel`].
    pub fn threshold_mode(mut self, threshold_mode: ThresholdMode) -> Self {
        self.threshold_mode = threshold_mode;
        self
    }

    /// After a reduction, the number of metrics whose lack of improvement is not counted; default 0.
    pub fn cooldown(mut self, cooldown: u64) -> Self {
        self.cooldown = cooldown;
        self
    }

    /// The lower bound of the rates, for all groups or for each; default 0.
    pub fn min_lr(mut self, min_lr: impl Into<PerGroup>) -> Self {
        self.min_lr = min_lr.into();
        self
    }

    /// A rate is lowered only if it changes by more than this; default 1e-8.
    pub fn eps(mut self, eps: f64) -> Self {
        self.eps = eps;
        self
    }

    /// Builds it over these rates, one per group.
    ///
    /// # Errors
    /// [`ScheduleError::InvalidOption`]
    pub fn build(self, lrs: &[f64]) -> Result<ReduceLrOnPlateau, ScheduleError> {
        check_base_lrs(lrs)?;
        let check = Check("ReduceLrOnPlateau");
        check.that((0.0..1.0).contains(&self.factor), "factor", "at least 0 and below 1", self.factor)?;
        check.factor("threshold", self.threshold)?;
        check.per_group("min_lr", &self.min_lr, lrs.len(), Check::factor)?;
        check.factor("eps", self.eps)?;
        let state = PlateauState { last_epoch: 0, best: self.mode.worst(), num_bad_epochs: 0, cooldown_counter: 0 };
        Ok(ReduceLrOnPlateau {
            options: self,
            lrs: lrs.to_vec(),
            state,
            #[cfg(feature = "torch")]
            claim: None,
        })
    }
}

impl ReduceLrOnPlateau {
    /// Options with PyTorch's defaults.
    pub fn builder() -> ReduceLrOnPlateauBuilder {
        ReduceLrOnPlateauBuilder {
            mode: Mode::Min,
            factor: 0.1,
            patience: 10,
            threshold: 1e-4,
            threshold_mode: ThresholdMode::Rel,
            cooldown: 0,
            min_lr: PerGroup::All(0.0),
            eps: 1e-8,
        }
    }

    /// Takes the next metric. Returns whether `patience` is exhausted: then every rate is lowered, except those that
    /// are at `min_lr` or would change by no more than `eps`.
    pub fn update(&mut self, metric: f64) -> bool {
        let state = &mut self.state;
        state.last_epoch += 1;
        if self.options.improves(metric, state.best) {
            (state.best, state.num_bad_epochs) = (metric, 0);
        } else {
            state.num_bad_epochs += 1;
        }
        if state.cooldown_counter > 0 {
            state.cooldown_counter -= 1;
            state.num_bad_epochs = 0;
        }
        if state.num_bad_epochs <= self.options.patience {
            return false;
        }
        (state.cooldown_counter, state.num_bad_epochs) = (self.options.cooldown, 0);
        for (group, lr) in self.lrs.iter_mut().enumerate() {
            let lower = (*lr * self.options.factor).max(self.options.min_lr.get(group));
            if *lr - lower > self.options.eps {
                *lr = lower;
            }
        }
        true
    }

    /// The groups' present rates.
    ///
    /// # Source
    /// `get_last_lr`
    #[doc(alias = "get_last_lr")]
    pub fn last_lr(&self) -> &[f64] {
        &self.lrs
    }

    /// The state so far.
    pub fn state(&self) -> PlateauState {
        self.state
    }

    /// Continues from a saved state and its rates.
    ///
    /// # Errors
    /// When the number of rates is not the number of groups, a rate is negative or not finite, or the best metric is
    /// NaN. Nothing changes then.
    pub fn resume(&mut self, state: PlateauState, lrs: &[f64]) -> Result<(), ScheduleError> {
        let check = Check("ReduceLrOnPlateau");
        check.that(lrs.len() == self.lrs.len(), "lrs", format_args!("{} rates", self.lrs.len()), lrs.len())?;
        check_base_lrs(lrs)?;
        check.that(!state.best.is_nan(), "best", "a number, or infinite", state.best)?;
        (self.state, self.lrs) = (state, lrs.to_vec());
        Ok(())
    }
}

impl ReduceLrOnPlateauBuilder {
    fn improves(&self, metric: f64, best: f64) -> bool {
        match (self.threshold_mode, self.mode) {
            (ThresholdMode::Rel, Mode::Min) => metric < best * (1.0 - self.threshold),
            (ThresholdMode::Rel, Mode::Max) => metric > best * (self.threshold + 1.0),
            (ThresholdMode::Abs, mode) => mode.improves(metric, best, self.threshold),
        }
    }
}
