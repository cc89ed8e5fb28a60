//! Triangular cycles between two rates, with the momentum cycled inversely.

use std::fmt;

use crate::error::Check;
use crate::{At, FactorFn, Group, PerGroup, Schedule, ScheduleError};

/// How the height of a [`CyclicLr`]'s triangles changes.
#[derive(Clone)]
#[non_exhaustive]
pub enum CyclicMode {
    /// The height is constant.
    Triangular,
    /// Each cycle is half as high as the previous one.
    Triangular2,
    /// The height is multiplied by `gamma` at each step.
    ExpRange,
    /// The height is multiplied by a function of the cycle, counted from 1.
    ByCycle(FactorFn),
    /// The height is multiplied by a function of the step.
    ByStep(FactorFn),
}

impl fmt::Debug for CyclicMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Triangular => "Triangular",
            Self::Triangular2 => "Triangular2",
            Self::ExpRange => "ExpRange",
            Self::ByCycle(_) => "ByCycle(..)",
            Self::ByStep(_) => "ByStep(..)",
        })
    }
}

/// Raises the rate from `base_lr` to `max_lr` and lowers it again, repeatedly, and the momentum inversely.
///
/// It sets its own rates: the optimizer's initial rates are ignored. The optimizer needs a momentum, unless
/// [`cycle_momentum`](Self::cycle_momentum) is off.
///
/// # Source
/// `CyclicLR`; Smith, "Cyclical Learning Rates for Training Neural Networks" (2017). PyTorch's `mode`, `scale_fn` and
/// `scale_mode` are one [`CyclicMode`].
#[doc(alias = "CyclicLR")]
#[derive(Clone, Debug)]
#[must_use = "a schedule does nothing until a scheduler runs it"]
pub struct CyclicLr {
    base_lr: PerGroup,
    max_lr: PerGroup,
    step_size_up: u64,
    step_size_down: Option<u64>,
    mode: CyclicMode,
    gamma: f64,
    cycle_momentum: bool,
    base_momentum: PerGroup,
    max_momentum: PerGroup,
}

impl CyclicLr {
    /// Cycles between these rates, for all groups or for each.
    pub fn new(base_lr: impl Into<PerGroup>, max_lr: impl Into<PerGroup>) -> Self {
        Self {
            base_lr: base_lr.into(),
            max_lr: max_lr.into(),
            step_size_up: 2000,
            step_size_down: None,
            mode: CyclicMode::Triangular,
            gamma: 1.0,
            cycle_momentum: true,
            base_momentum: PerGroup::All(0.8),
            max_momentum: PerGroup::All(0.9),
        }
    }

    /// The number of steps from `base_lr` to `max_lr`, at least 1; default 2000.
    pub fn step_size_up(mut self, step_size_up: u64) -> Self {
        self.step_size_up = step_size_up;
        self
    }

    /// The number of steps from `max_lr` back to `base_lr`; default as many as up.
    pub fn step_size_down(mut self, step_size_down: u64) -> Self {
        self.step_size_down = Some(step_size_down);
        self
    }

    /// How the height of the triangles changes; default [`CyclicMode::Triangular`].
    #[doc(alias = "scale_fn")]
    pub fn mode(mut self, mode: CyclicMode) -> Self {
        self.mode = mode;
        self
    }

    /// The factor of [`CyclicMode::ExpRange`]; default 1.
    pub fn gamma(mut self, gamma: f64) -> Self {
        self.gamma = gamma;
        self
    }

    /// Sets whether the momentum is cycled; default true.
    pub fn cycle_momentum(mut self, cycle_momentum: bool) -> Self {
        self.cycle_momentum = cycle_momentum;
        self
    }

    /// The momentum at the highest rate, for all groups or for each; default 0.8.
    pub fn base_momentum(mut self, base_momentum: impl Into<PerGroup>) -> Self {
        self.base_momentum = base_momentum.into();
        self
    }

    /// The momentum at the lowest rate, for all groups or for each; default 0.9.
    pub fn max_momentum(mut self, max_momentum: impl Into<PerGroup>) -> Self {
        self.max_momentum = max_momentum.into();
        self
    }

    /// The position of a step on its triangle, from 0 (bottom) to 1 (top), and the triangle's height factor.
    fn place(&self, step: u64) -> (f64, f64) {
        let up = self.step_size_up as f64;
        let total = up + self.step_size_down.map_or(up, |down| down as f64);
        let (step, share_up) = (step as f64, up / total);
        let cycle = (1.0 + step / total).floor();
        let x = 1.0 + step / total - cycle;
        let height = if x <= share_up { x / share_up } else { (x - 1.0) / (share_up - 1.0) };
        let scale = match &self.mode {
            CyclicMode::Triangular => 1.0,
            CyclicMode::Triangular2 => 1.0 / 2f64.powf(cycle - 1.0),
            CyclicMode::ExpRange => self.gamma.powf(step),
            CyclicMode::ByCycle(scale) => scale(cycle as u64),
            CyclicMode::ByStep(scale) => scale(step as u64),
        };
        (height, scale)
    }
}

impl Schedule for CyclicLr {
    fn name(&self) -> &'static str {
        "CyclicLr"
    }

    fn prepare(&self, index: usize, group: &mut Group) {
        group.lr = self.base_lr.get(index);
    }

    fn base_lr(&self, index: usize) -> Option<f64> {
        Some(self.base_lr.get(index))
    }

    fn lr(&self, at: &At) -> f64 {
        let (height, scale) = self.place(at.step);
        let max = self.max_lr.get(at.group);
        at.base_lr + (max - at.base_lr) * height * scale
    }

    fn momentum(&self, at: &At) -> Option<f64> {
        let (height, scale) = self.cycle_momentum.then(|| self.place(at.step))?;
        let (base, max) = (self.base_momentum.get(at.group), self.max_momentum.get(at.group));
        Some(max - (max - base) * height * scale)
    }

    fn check(&self, groups: usize) -> Result<(), ScheduleError> {
        let check = Check(self.name());
        check.per_group("base_lr", &self.base_lr, groups, Check::factor)?;
        check.per_group("max_lr", &self.max_lr, groups, Check::factor)?;
        check.at_least_1("step_size_up", self.step_size_up)?;
        check.factor("gamma", self.gamma)?;
        check.per_group("base_momentum", &self.base_momentum, groups, Check::momentum)?;
        check.per_group("max_momentum", &self.max_momentum, groups, Check::momentum)
    }
}
