//! Chooses the checkpoints to keep: the newest, and the best by a metric.

use std::cmp::Ordering;

use crate::folder::Folder;
use crate::manifest::{Manifest, Metric};

/// Whether a smaller or a larger metric is better.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// Smaller is better: a loss.
    Min,
    /// Larger is better: an accuracy.
    Max,
}

/// How many of the newest and of the best checkpoints to keep.
#[derive(Clone, Debug)]
pub(crate) struct Retention {
    pub newest: usize,
    pub best: Option<Best>,
}

/// How many of the best checkpoints to keep, and by which metric.
#[derive(Clone, Debug)]
pub(crate) struct Best {
    pub count: usize,
    /// The name of the metric: of a field of the checkpoint, whose value the manifest has.
    pub metric: String,
    pub goal: Goal,
}

impl Retention {
    /// The steps whose checkpoints are to be removed. `steps` is in rising order. `written`, the step that was just
    /// saved, is always kept.
    pub fn surplus(&self, folder: &Folder, steps: &[u64], written: u64) -> Vec<u64> {
        let surplus = steps.len().saturating_sub(self.newest);
        let old = || steps.iter().copied().filter(|&step| step != written).take(surplus);
        // Reading manifests takes time, so they are read only if a checkpoint may be removed.
        let best = match &self.best {
            Some(best) if surplus > 0 => best.of(folder, steps),
            _ => Vec::new(),
        };
        old().filter(|step| !best.contains(step)).collect()
    }
}

impl Best {
    /// The best of these steps, best first. Leaves out steps whose manifest cannot be read or has no metric of this
    /// name, and those whose metric is NaN.
    pub fn of(&self, folder: &Folder, steps: &[u64]) -> Vec<u64> {
        let metric = |&step: &u64| {
            let Metric { name, value } = Manifest::read(&folder.step(step)).ok()?.metric?;
            (name == self.metric && !value.is_nan()).then_some((value, step))
        };
        let mut known: Vec<(f64, u64)> = steps.iter().filter_map(metric).collect();
        let order = |one: &(f64, u64), other: &(f64, u64)| {
            let by_metric = one.0.partial_cmp(&other.0).unwrap_or(Ordering::Equal);
            let by_metric = if self.goal == Goal::Max { by_metric.reverse() } else { by_metric };
            // Of equal metrics the earlier one is better: it was measured there, whereas later checkpoints repeat the
            // value until it is set again.
            by_metric.then(one.1.cmp(&other.1))
        };
        known.sort_by(order);
        known.into_iter().take(self.count).map(|(_, step)| step).collect()
    }
}
