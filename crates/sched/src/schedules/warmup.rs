//! Schedules that PyTorch lacks: those with a warm-up (cosine, warmup-stable-decay, inverse square root, Noam), and
//! layer-wise learning rates.

use std::f64::consts::PI;

use crate::error::Check;
use crate::{At, Schedule, ScheduleError};

/// The factor of a linear warm-up, from `start_factor` to 1 within `warmup` steps.
fn warm_up(step: u64, warmup: u64, start_factor: f64) -> f64 {
    start_factor + (1.0 - start_factor) * (step as f64 / warmup as f64)
}

/// A linear warm-up, then cosine annealing. After the last step the rate stays at its final value.
///
/// # Source
/// Goyal et al., "Accurate, Large Minibatch SGD" (2017) for the warm-up, Loshchilov and Hutter, "SGDR" (2017) for the
/// cosine; `get_cosine_schedule_with_warmup` of transformers.
#[doc(alias = "get_cosine_schedule_with_warmup")]
#[derive(Clone, Debug, PartialEq)]
#[must_use = "a schedule does nothing until a scheduler runs it"]
pub struct WarmupCosineLr {
    warmup_steps: u64,
    total_steps: u64,
    start_factor: f64,
    end_factor: f64,
}

impl WarmupCosineLr {
    /// Warms up within `warmup_steps`, and ends at `total_steps`, which should be larger.
    pub fn new(warmup_steps: u64, total_steps: u64) -> Self {
        Self { warmup_steps, total_steps, start_factor: 0.0, end_factor: 0.0 }
    }

    /// The factor of the base rate at step 0; default 0.
    pub fn start_factor(mut self, start_factor: f64) -> Self {
        self.start_factor = start_factor;
        self
    }

    /// The factor of the base rate at the end; default 0.
    pub fn end_factor(mut self, end_factor: f64) -> Self {
        self.end_factor = end_factor;
        self
    }

    /// The factor of the base rate at a step.
    pub fn factor(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return warm_up(step, self.warmup_steps, self.start_factor);
        }
        let (since, length) = (step - self.warmup_steps, self.total_steps.saturating_sub(self.warmup_steps));
        let left = DecayShape::Cosine.left(since, length);
        left * (1.0 - self.end_factor) + self.end_factor
    }
}

impl Schedule for WarmupCosineLr {
    fn name(&self) -> &'static str {
        "WarmupCosineLr"
    }

    fn lr(&self, at: &At) -> f64 {
        at.base_lr * self.factor(at.step)
    }

    fn check(&self, _groups: usize) -> Result<(), ScheduleError> {
        let check = Check(self.name());
        let above = format_args!("above warmup_steps ({})", self.warmup_steps).to_string();
        check.that(self.total_steps > self.warmup_steps, "total_steps", above, self.total_steps)?;
        check.fraction("start_factor", self.start_factor)?;
        check.factor("end_factor", self.end_factor)
    }
}

/// The curve of a [`WarmupStableDecayLr`]'s decay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DecayShape {
    /// A line.
    #[default]
    Linear,
    /// Half a cosine.
    Cosine,
    /// `1 - sqrt(t)`, where `t` rises from 0 to 1 during the decay: steep at first.
    OneMinusSqrt,
}

impl DecayShape {
    /// The decay factor after `since` of `length` steps of the decay: it falls from 1 to 0.
    fn left(self, since: u64, length: u64) -> f64 {
        if since >= length {
            return 0.0;
        }
        let share = since as f64 / length as f64;
        match self {
            Self::Linear => 1.0 - share,
            Self::Cosine => 0.5 * (1.0 + (PI * share).cos()),
            Self::OneMinusSqrt => 1.0 - share.sqrt(),
        }
    }
}

/// A linear warm-up, a plateau at the base rate, and a decay at the end. After the last step the rate stays at its
/// final value.
///
/// # Source
/// Hu et al., "MiniCPM" (2024); Hägele et al., "Scaling Laws and Compute-Optimal Training Beyond Fixed Training
/// Durations" (2024) for the shapes; `get_wsd_schedule` of transformers.
#[doc(alias = "WSD")]
#[derive(Clone, Debug, PartialEq)]
#[must_use = "a schedule does nothing until a scheduler runs it"]
pub struct WarmupStableDecayLr {
    warmup_steps: u64,
    stable_steps: u64,
    decay_steps: u64,
    start_factor: f64,
    end_factor: f64,
    shape: DecayShape,
}

impl WarmupStableDecayLr {
    /// The numbers of steps of the warm-up, of the plateau at the base rate, and of the decay.
    pub fn new(warmup_steps: u64, stable_steps: u64, decay_steps: u64) -> Self {
        let (start_factor, end_factor) = (0.0, 0.0);
        Self { warmup_steps, stable_steps, decay_steps, start_factor, end_factor, shape: DecayShape::Linear }
    }

    /// The factor of the base rate at step 0; default 0.
    pub fn start_factor(mut self, start_factor: f64) -> Self {
        self.start_factor = start_factor;
        self
    }

    /// The factor of the base rate at the end; default 0.
    pub fn end_factor(mut self, end_factor: f64) -> Self {
        self.end_factor = end_factor;
        self
    }

    /// The curve of the decay; default [`DecayShape::Linear`].
    pub fn shape(mut self, shape: DecayShape) -> Self {
        self.shape = shape;
        self
    }

    /// The factor of the base rate at a step.
    pub fn factor(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return warm_up(step, self.warmup_steps, self.start_factor);
        }
        let Some(since) = (step - self.warmup_steps).checked_sub(self.stable_steps) else { return 1.0 };
        self.shape.left(since, self.decay_steps) * (1.0 - self.end_factor) + self.end_factor
    }
}

impl Schedule for WarmupStableDecayLr {
    fn name(&self) -> &'static str {
        "WarmupStableDecayLr"
    }

    fn lr(&self, at: &At) -> f64 {
        at.base_lr * self.factor(at.step)
    }

    fn check(&self, _groups: usize) -> Result<(), ScheduleError> {
        let check = Check(self.name());
        check.at_least_1("decay_steps", self.decay_steps)?;
        check.fraction("start_factor", self.start_factor)?;
        check.factor("end_factor", self.end_factor)
    }
}

/// A linear warm-up from zero to the base rate, then a decay with the inverse square root of the step.
///
/// # Source
/// `get_inverse_sqrt_schedule` of transformers, fairseq's `inverse_sqrt`.
#[derive(Clone, Debug, PartialEq)]
#[must_use = "a schedule does nothing until a scheduler runs it"]
pub struct InverseSqrtLr {
    warmup_steps: u64,
}

impl InverseSqrtLr {
    /// The base rate is reached at `warmup_steps`, at least 1.
    pub fn new(warmup_steps: u64) -> Self {
        Self { warmup_steps }
    }

    /// The factor of the base rate at a step.
    pub fn factor(&self, step: u64) -> f64 {
        if step < self.warmup_steps {
            return warm_up(step, self.warmup_steps, 0.0);
        }
        1.0 / (step as f64 / self.warmup_steps as f64).sqrt()
    }
}

impl Schedule for InverseSqrtLr {
    fn name(&self) -> &'static str {
        "InverseSqrtLr"
    }

    fn lr(&self, at: &At) -> f64 {
        at.base_lr * self.factor(at.step)
    }

    fn check(&self, _groups: usize) -> Result<(), ScheduleError> {
        Check(self.name()).at_least_1("warmup_steps", self.warmup_steps)
    }
}

/// The rate of the original transformer: the base rate (usually 1) times `d_model^-0.5 * min(n^-0.5, n * warmup^-1.5)`,
/// where `n` counts steps from 1.
///
/// # Source
/// Vaswani et al., "Attention Is All You Need" (2017), eq. 3.
#[derive(Clone, Debug, PartialEq)]
#[must_use = "a schedule does nothing until a scheduler runs it"]
pub struct NoamLr {
    d_model: u64,
    warmup_steps: u64,
}

impl NoamLr {
    /// For a model of this width, with the highest rate at the `warmup_steps`-th step; both at least 1.
    pub fn new(d_model: u64, warmup_steps: u64) -> Self {
        Self { d_model, warmup_steps }
    }

    /// The factor of the base rate at a step.
    pub fn factor(&self, step: u64) -> f64 {
        let number = step as f64 + 1.0;
        let scale = (self.d_model as f64).powf(-0.5);
        scale * number.powf(-0.5).min(number * (self.warmup_steps as f64).powf(-1.5))
    }
}

impl Schedule for NoamLr {
    fn name(&self) -> &'static str {
        "NoamLr"
    }

    fn lr(&self, at: &At) -> f64 {
        at.base_lr * self.factor(at.step)
    }

    fn check(&self, _groups: usize) -> Result<(), ScheduleError> {
        let check = Check(self.name());
        check.at_least_1("d_model", self.d_model)?;
        check.at_least_1("warmup_steps", self.warmup_steps)
    }
}

/// Base rates for layer-wise decay: the closer a group is to the input, the smaller its rate. Group `g` of `groups`,
/// counted from 0 at the input, gets `lr * decay^(groups - 1 - g)`.
///
/// ```
/// use overdrive_sched::{CosineAnnealingLr, Scheduler, layer_wise_lrs};
///
/// // Embedding, two blocks, head.
/// let sched = Scheduler::new(&layer_wise_lrs(1e-3, 0.5, 4)?, CosineAnnealingLr::new(100))?;
/// assert_eq!(sched.last_lr(), [0.125e-3, 0.25e-3, 0.5e-3, 1e-3]);
/// # Ok::<(), overdrive_sched::ScheduleError>(())
/// ```
///
/// # Errors
/// When `lr` is negative or not finite, `decay` is not above 0 and at most 1, or there is no group.
///
/// # Source
/// Clark et al., "ELECTRA" (2020); Bao et al., "BEiT" (2022).
#[doc(alias = "layer-wise learning rate decay")]
#[doc(alias = "LLRD")]
pub fn layer_wise_lrs(lr: f64, decay: f64, groups: usize) -> Result<Vec<f64>, ScheduleError> {
    let check = Check("layer_wise_lrs");
    check.factor("lr", lr)?;
    check.positive_fraction("decay", decay)?;
    check.that(groups >= 1, "groups", "at least 1", groups)?;
    Ok((0..groups).rev().map(|above| lr * decay.powf(above as f64)).collect())
}
