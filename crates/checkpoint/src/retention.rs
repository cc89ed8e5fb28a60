//! Chooses the checkpoints to keep: the newest, and the best by a metric.

use std::cmp::Ordering;

use crate::error::CheckpointError;
use crate::folder::Folder;
use crate::manifest::Metric;
use crate::run::Run;

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
    /// The steps whose checkpoints in this folder are to be removed, up to `upto`. `written`, the step that was just saved,
    /// is always kept.
    pub fn surplus(&self, run: &Run, folder: &Folder, upto: u64, written: u64) -> Result<Vec<u64>, CheckpointError> {
        let upto = |mut steps: Vec<u64>| {
            steps.retain(|&step| step <= upto);
            steps
        };
        let steps = upto(folder.steps()?);
        let surplus = steps.len().saturating_sub(self.newest);
        let old = || steps.iter().copied().filter(|&step| step != written).take(surplus);
        // Reading manifests takes time, so they are read only if a checkpoint may be removed.
        let best = match &self.best {
            // Another number of ranks may have saved the best: then it is in their folders, and none of these is.
            Some(best) if surplus > 0 => best.of(run, folder, &upto(run.steps(folder)?)),
            _ => Vec::new(),
        };
        Ok(old().filter(|step| !best.contains(step)).collect())
    }
}

impl Best {
    /// The best of these steps, best first. Leaves out steps whose manifest cannot be read or has no metric of this
    /// name, and those whose metric is NaN.
    pub fn of(&self, run: &Run, folder: &Folder, steps: &[u64]) -> Vec<u64> {
        let metric = |&step: &u64| {
            let Metric { name, value } = run.metric(folder, step)?;
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
