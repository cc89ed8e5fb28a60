//! `WarmupLR`, `WarmupDecayLR` and `WarmupCosineLR`.

use std::f64::consts::PI;

use overdrive_sched::{At, PerGroup};

/// How a rate rises from 0 to 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Warmup {
    /// At least 2, as in DeepSpeed.
    pub steps: u64,
    /// With the logarithm of the iteration, not in a line.
    pub is_log: bool,
}

impl Warmup {
    /// `None` once it is over.
    fn share(self, iteration: u64) -> Option<f64> {
        let (number, steps) = (iteration as f64, self.steps as f64);
        let share = if self.is_log { 1.0 / steps.ln() * (number + 1.0).ln() } else { number / steps };
        (iteration < self.steps).then_some(share)
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct WarmupLr {
    pub min_lr: PerGroup,
    /// The optimizer's rate if there is none.
    pub max_lr: Option<PerGroup>,
    pub warmup: Warmup,
    pub decay: Decay,
}

/// What comes after the warm-up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Decay {
    None,
    /// To zero at the last step.
    Linear {
        total: u64,
    },
}

impl WarmupLr {
    pub(super) fn lr(&self, at: &At) -> f64 {
        let min = self.min_lr.get(at.group);
        let max = self.max_lr.as_ref().map_or(at.base_lr, |max| max.get(at.group));
        // Step 0 is before DeepSpeed's first iteration.
        let Some(iteration) = at.step.checked_sub(1) else { return min };
        let gamma = self.warmup.share(iteration).unwrap_or_else(|| match self.decay {
            Decay::None => 1.0,
            Decay::Linear { total } => {
                let (total, warmup) = (total as f64, self.warmup.steps as f64);
                ((total - iteration as f64) / (total - warmup).max(1.0)).max(0.0)
            }
        });
        min + (max - min) * gamma
    }
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct WarmupCosine {
    pub warmup: Warmup,
    pub total: u64,
    pub warmup_min_ratio: f64,
    pub cos_min_ratio: f64,
}

impl WarmupCosine {
    pub(super) fn lr(&self, at: &At) -> f64 {
        let Some(iteration) = at.step.checked_sub(1) else { return 0.0 };
        at.base_lr * self.ratio(iteration)
    }

    fn ratio(&self, iteration: u64) -> f64 {
        if let Some(share) = self.warmup.share(iteration) {
            return self.warmup_min_ratio + share * (1.0 - self.warmup_min_ratio);
        }
        let since = (iteration - self.warmup.steps + 1) as f64;
        let progress = (since / (self.total as f64 - self.warmup.steps as f64).max(1.0)).min(1.0);
        let cosine = (1.0 + (PI * progress).cos()) / 2.0;
        (self.cos_min_ratio + (1.0 - self.cos_min_ratio) * cosine).max(0.0)
    }
}
