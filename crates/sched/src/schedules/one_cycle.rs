//! One cycle over the whole training, with the momentum cycled inversely.

use std::f64::consts::PI;

use crate::error::Check;
use crate::{At, Group, PerGroup, Schedule, ScheduleError};

/// How a [`OneCycleLr`] goes from one rate to the next.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AnnealStrategy {
    /// Along half a cosine.
    #[default]
    Cos,
    /// Along a line.
    Linear,
}

impl AnnealStrategy {
    fn between(self, start: f64, end: f64, share: f64) -> f64 {
        match self {
            Self::Cos => end + (start - end) / 2.0 * ((PI * share).cos() + 1.0),
            Self::Linear => (end - start) * share + start,
        }
    }
}

/// Raises the rate from `max_lr / div_factor` to `max_lr`, then lowers it far below the first; the momentum inversely.
///
/// It sets its own rates: the optimizer's initial rates are ignored. The optimizer needs a momentum, unless
/// [`cycle_momentum`](Self::cycle_momentum) is off. There is one more value than `total_steps`, so that a loop may also
/// step after its last batch; further steps are [`ScheduleError::Finished`].
///
/// # Source
/// `OneCycleLR`; Smith and Topin, "Super-Convergence" (2018). The value after the last step is PyTorch's too, which
/// extrapolates the last phase; but here a rate below 0 becomes 0, and a momentum outside [0, 1) becomes the final one.
/// Several `OneCycleLr` in one plan keep their own rates; PyTorch's overwrite each other's.
#[doc(alias = "OneCycleLR")]
#[derive(Clone, Debug, PartialEq)]
#[must_use = "a schedule does nothing until a scheduler runs it"]
pub struct OneCycleLr {
    max_lr: PerGroup,
    total_steps: u64,
    pct_start: f64,
    anneal_strategy: AnnealStrategy,
    cycle_momentum: bool,
    base_momentum: PerGroup,
    max_momentum: PerGroup,
    div_factor: f64,
    final_div_factor: f64,
    three_phase: bool,
}

/// The end points of phases, each with a rate and a momentum.
#[derive(Clone, Copy)]
enum Corner {
    Initial,
    Max,
    Min,
}

impl OneCycleLr {
    /// A cycle with this highest rate, for all groups or for each, over `total_steps`, at least 1.
    pub fn new(max_lr: impl Into<PerGroup>, total_steps: u64) -> Self {
        Self {
            max_lr: max_lr.into(),
            total_steps,
            pct_start: 0.3,
            anneal_strategy: AnnealStrategy::Cos,
            cycle_momentum: true,
            base_momentum: PerGroup::All(0.85),
            max_momentum: PerGroup::All(0.95),
            div_factor: 25.0,
            final_div_factor: 1e4,
            three_phase: false,
        }
    }

    /// The fraction of the steps in which the rate rises, from 0 to 1; default 0.3.
    pub fn pct_start(mut self, pct_start: f64) -> Self {
        self.pct_start = pct_start;
        self
    }

    /// The curve between rates; default [`AnnealStrategy::Cos`].
    pub fn anneal_strategy(mut self, anneal_strategy: AnnealStrategy) -> Self {
        self.anneal_strategy = anneal_strategy;
        self
    }

    /// Sets whether the momentum is cycled; default true.
    pub fn cycle_momentum(mut self, cycle_momentum: bool) -> Self {
        self.cycle_momentum = cycle_momentum;
        self
    }

    /// The momentum at the highest rate, for all groups or for each; default 0.85.
    pub fn base_momentum(mut self, base_momentum: impl Into<PerGroup>) -> Self {
        self.base_momentum = base_momentum.into();
        self
    }

    /// The momentum at the lowest rates, for all groups or for each; default 0.95.
    pub fn max_momentum(mut self, max_momentum: impl Into<PerGroup>) -> Self {
        self.max_momentum = max_momentum.into();
        self
    }

    /// The first rate is the highest one divided by this; default 25.
    pub fn div_factor(mut self, div_factor: f64) -> Self {
        self.div_factor = div_factor;
        self
    }

    /// The last rate is the first one divided by this; default 10,000.
    pub fn final_div_factor(mut self, final_div_factor: f64) -> Self {
        self.final_div_factor = final_div_factor;
        self
    }

    /// Sets whether the rate first falls to the initial one, in as many steps as it rose, and then to the last one;
    /// default false.
    pub fn three_phase(mut self, three_phase: bool) -> Self {
        self.three_phase = three_phase;
        self
    }

    /// The end points of a step's phase, and the step's position between them, from 0 to 1; a little above 1 for the
    /// value after the last step.
    fn place(&self, step: u64) -> (Corner, Corner, f64) {
        let (step, total) = (step as f64, self.total_steps as f64);
        let top = self.pct_start * total - 1.0;
        let phases: &[_] = if self.three_phase {
            let down = 2.0 * self.pct_start * total - 2.0;
            &[
                (top, Corner::Initial, Corner::Max),
                (down, Corner::Max, Corner::Initial),
                (total - 1.0, Corner::Initial, Corner::Min),
            ]
        } else {
            &[(top, Corner::Initial, Corner::Max), (total - 1.0, Corner::Max, Corner::Min)]
        };
        let (mut begin, mut place) = (0.0, (Corner::Initial, Corner::Initial, 1.0));
        for &(end, from, to) in phases {
            // A phase of length 0 is at its end.
            place = (from, to, if end == begin { 1.0 } else { (step - begin) / (end - begin) });
            if step <= end {
                break;
            }
            begin = end;
        }
        place
    }

    fn lr_of(&self, corner: Corner, group: usize) -> f64 {
        let max = self.max_lr.get(group);
        match corner {
            Corner::Initial => max / self.div_factor,
            Corner::Max => max,
            Corner::Min => max / self.div_factor / self.final_div_factor,
        }
    }

    fn momentum_of(&self, corner: Corner, group: usize) -> f64 {
        match corner {
            Corner::Max => self.base_momentum.get(group),
            Corner::Initial | Corner::Min => self.max_momentum.get(group),
        }
    }
}

impl Schedule for OneCycleLr {
    fn name(&self) -> &'static str {
        "OneCycleLr"
    }

    fn prepare(&self, index: usize, group: &mut Group) {
        group.initial_lr = Some(self.lr_of(Corner::Initial, index));
    }

    fn lr(&self, at: &At) -> f64 {
        let (from, to, share) = self.place(at.step);
        let lr = self.anneal_strategy.between(self.lr_of(from, at.group), self.lr_of(to, at.group), share);
        if at.step == self.total_steps && lr < 0.0 { 0.0 } else { lr }
    }

    fn momentum(&self, at: &At) -> Option<f64> {
        let (from, to, share) = self.cycle_momentum.then(|| self.place(at.step))?;
        let end = self.momentum_of(to, at.group);
        let momentum = self.anneal_strategy.between(self.momentum_of(from, at.group), end, share);
        let beyond = at.step == self.total_steps && !(0.0..1.0).contains(&momentum);
        Some(if beyond { end } else { momentum })
    }

    fn last_step(&self) -> Option<u64> {
        Some(self.total_steps)
    }

    fn check(&self, groups: usize) -> Result<(), ScheduleError> {
        let check = Check(self.name());
        check.per_group("max_lr", &self.max_lr, groups, Check::factor)?;
        check.at_least_1("total_steps", self.total_steps)?;
        check.fraction("pct_start", self.pct_start)?;
        check.per_group("base_momentum", &self.base_momentum, groups, Check::momentum)?;
        check.per_group("max_momentum", &self.max_momentum, groups, Check::momentum)?;
        check.positive("div_factor", self.div_factor)?;
        check.positive("final_div_factor", self.final_div_factor)
    }
}
