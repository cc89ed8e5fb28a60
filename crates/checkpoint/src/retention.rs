//! Which checkpoints stay.

use std::cmp::Ordering;

use crate::folder::Folder;
use crate::manifest::{Manifest, Metric};

/// Which of two metrics is the better one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Goal {
    /// The smaller: a loss.
    Min,
    /// The larger: an accuracy.
    Max,
}

/// The newest, and beside them the best.
#[derive(Clone, Debug)]
pub(crate) struct Retention {
    pub newest: usize,
    pub best: Option<Best>,
}

/// So many of the best by a metric.
#[derive(Clone, Debug)]
pub(crate) struct Best {
    pub count: usize,
    /// The field that holds it.
    pub metric: String,
    pub goal: Goal,
}

impl Retention {
    /// Those of `steps`, which are in order, that are not kept.
    pub fn surplus(&self, folder: &Folder, steps: &[u64], written: u64) -> Vec<u64> {
        let surplus = steps.len().saturating_sub(self.newest);
        let old = || steps.iter().copied().filter(|&step| step != written).take(surplus);
        // Manifests are read only where there is something to choose.
        let best = match &self.best {
            Some(best) if surplus > 0 => best.of(folder, steps),
            _ => Vec::new(),
        };
        old().filter(|step| !best.contains(step)).collect()
    }
}

impl Best {
    /// The best of these steps, best first. One whose manifest cannot be read, or has no such metric, is none of them.
    pub fn of(&self, folder: &Folder, steps: &[u64]) -> Vec<u64> {
        let metric = |&step: &u64| {
            let Metric { name, value } = Manifest::read(&folder.step(step)).ok()?.metric?;
            (name == self.metric).then_some((value, step))
        };
        let mut known: Vec<(f64, u64)> = steps.iter().filter_map(metric).collect();
        let order = |one: &(f64, u64), other: &(f64, u64)| {
            let better = one.0.partial_cmp(&other.0).unwrap_or(Ordering::Equal);
            let better = if self.goal == Goal::Max { better.reverse() } else { better };
            // Of equals the first: the field may still hold what was measured then.
            better.then(one.1.cmp(&other.1))
        };
        known.sort_by(order);
        known.into_iter().take(self.count).map(|(_, step)| step).collect()
    }
}
