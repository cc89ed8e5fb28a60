//! `OneCycle`.

use overdrive_sched::{At, PerGroup};

/// The rate rises and falls in one cycle, the momentum inversely; then the rate decays.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct OneCycle {
    pub min_lr: PerGroup,
    pub max_lr: PerGroup,
    pub decay_lr_rate: f64,
    /// Steps up and down.
    pub first: f64,
    pub second: f64,
    /// In how many stairs each half goes; 0 for a line.
    pub first_stairs: f64,
    pub second_stairs: f64,
    /// 0 for no decay.
    pub decay_step_size: f64,
    pub momentum: Option<Momentum>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct Momentum {
    pub min: PerGroup,
    pub max: PerGroup,
    pub decay_rate: f64,
}

/// Where a step is.
enum Place {
    /// At this height of the cycle, from 0 to 1.
    Cycle(f64),
    /// After so many intervals of the decay.
    Decay(f64),
}

impl OneCycle {
    pub(super) fn lr(&self, at: &At) -> f64 {
        let (min, max) = (self.min_lr.get(at.group), self.max_lr.get(at.group));
        match self.place(at.step) {
            Place::Cycle(height) => min + (max - min) * height,
            Place::Decay(intervals) => min / (1.0 + self.decay_lr_rate * intervals),
        }
    }

    pub(super) fn momentum(&self, at: &At) -> Option<f64> {
        let momentum = self.momentum.as_ref()?;
        let (min, max) = (momentum.min.get(at.group), momentum.max.get(at.group));
        // DeepSpeed begins with the smallest momentum, and cycles from the largest.
        if at.step == 0 {
            return Some(min);
        }
        Some(match self.place(at.step) {
            Place::Cycle(height) => max - (max - min) * height,
            Place::Decay(intervals) => max * (1.0 + momentum.decay_rate * intervals),
        })
    }

    /// Step n has the values of DeepSpeed's iteration n - 1, which it computes for its number n.
    fn place(&self, step: u64) -> Place {
        let (step, total) = (step as f64, self.first + self.second);
        if step - 1.0 >= total {
            let intervals = if self.decay_step_size == 0.0 { 0.0 } else { (step - total) / self.decay_step_size };
            return Place::Decay(intervals);
        }
        Place::Cycle(self.height(step, total))
    }

    fn height(&self, step: f64, total: f64) -> f64 {
        let up = self.first / total;
        let cycle = (1.0 + step / total).floor();
        let x = 1.0 + step / total - cycle;
        let is_first = x <= up;
        let stairs = if is_first { self.first_stairs } else { self.second_stairs };
        if stairs > 0.0 {
            let within = step % total;
            let position = match within <= self.first {
                true => within * stairs / self.first,
                false => (total - within) * stairs / self.second,
            };
            return position.floor() / stairs;
        }
        if is_first { x / up } else { (x - 1.0) / (up - 1.0) }
    }
}
