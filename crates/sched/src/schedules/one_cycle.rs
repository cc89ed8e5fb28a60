//! One cycle over the whole training, with the momentum against it.

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

/// Up from `max_lr / div_factor` to `max_lr`, then down to a rate far below the first; the momentum the other way.
///
/// It brings its own rates: those of the optimizer do not matter. The optimizer needs a momentum, unless
/// [`cycle_momentum`](Self::cycle_momentum) is off. There is one value more than steps, so that a loop may step behind
/// its last batch too; further ones are [`ScheduleError::Finished`].
///
/// # Source
/// `OneCycleLR`; Smith and Topin, "Super-Convergence" (2018). That last value too is PyTorch's, which follows the line
/// beyond its end; but a rate below 0 is 0 here, and a momentum outside [0, 1) that of the end. Several within one plan
/// keep their own rates, where PyTorch's write over each other's.
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

/// A rate, and the momentum that goes with it.
#[derive(Clone, Copy)]
enum Corner {
    Initial,
    Max,
    Min,
}

impl OneCycleLr {
    /// With this highest rate, for all groups or for each, over `total_steps`, at least 1.
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

    /// The share of the steps that goes up, from 0 to 1; 0.3 when not said.
    pub fn pct_start(mut self, pct_start: f64) -> Self {
        self.pct_start = pct_start;
        self
    }

    /// The way between rates; [`AnnealStrategy::Cos`] when not said.
    pub fn anneal_strategy(mut self, anneal_strategy: AnnealStrategy) -> Self {
        self.anneal_strategy = anneal_strategy;
        self
    }

    /// Whether the momentum moves; true when not said.
    pub fn cycle_momentum(mut self, cycle_momentum: bool) -> Self {
        self.cycle_momentum = cycle_momentum;
        self
    }

    /// The momentum where the rate is highest, for all groups or for each; 0.85 when not said.
    pub fn base_momentum(mut self, base_momentum: impl Into<PerGroup>) -> Self {
        self.base_momentum = base_momentum.into();
        self
    }

    /// The momentum where the rate is low, for all groups or for each; 0.95 when not said.
    pub fn max_momentum(mut self, max_momentum: impl Into<PerGroup>) -> Self {
        self.max_momentum = max_momentum.into();
        self
    }

    /// The first rate is the highest one divided by this; 25 when not said.
    pub fn div_factor(mut self, div_factor: f64) -> Self {
        self.div_factor = div_factor;
        self
    }

    /// The last rate is the first one divided by this; 10,000 when not said.
    pub fn final_div_factor(mut self, final_div_factor: f64) -> Self {
        self.final_div_factor = final_div_factor;
        self
    }

    /// Whether it comes down to the first rate in as many steps as it went up, and from there to the last one.
    pub fn three_phase(mut self, three_phase: bool) -> Self {
        self.three_phase = three_phase;
        self
    }

    /// The two corners that a step is between, and how far it is, from 0 to 1 and a little above for the value behind
    /// the last step.
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
            // A phase of no length is over at once.
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
        check.share("pct_start", self.pct_start)?;
        check.per_group("base_momentum", &self.base_momentum, groups, Check::momentum)?;
        check.per_group("max_momentum", &self.max_momentum, groups, Check::momentum)?;
        check.positive("div_factor", self.div_factor)?;
        check.positive("final_div_factor", self.final_div_factor)
    }
}
