//! Checks the diagnosis of a loop, and extracts the part of its record that does not depend on times.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use overdrive_profile::{Bottleneck, Diagnosis, RunProfile};

use super::Plant;

impl Plant {
    /// Checks that the diagnosis of a run names the planted bottleneck first. For a healthy loop, checks that it finds
    /// nothing and names the right limit. The diagnosis depends on times, so it may be wrong for a run on a busy
    /// machine.
    ///
    /// # Errors
    /// When the diagnosis is wrong. The error contains all of it.
    pub fn judge(&self, run: &RunProfile) -> Result<()> {
        let diagnosis = Diagnosis::of(run);
        let report = || format!("{}\n{diagnosis:#?}", run.steps.as_ref().map_or(String::new(), ToString::to_string));
        let (expected, bound) = (self.bottleneck, diagnosis.bound_by);
        if self.is_healthy() {
            ensure!(diagnosis.findings.is_empty(), "the diagnosis finds something in a healthy loop:\n{}", report());
            let is_right = bound == Some(expected) || bound.is_some() && bound == self.or;
            ensure!(is_right, "bound by {bound:?} instead of {expected:?}:\n{}", report());
            return Ok(());
        }
        let first =
            diagnosis.findings.first().with_context(|| format!("the diagnosis finds nothing:\n{}", report()))?;
        let is_first = first.bottleneck == expected && bound == Some(expected);
        ensure!(
            is_first,
            "the first finding is {:?}, bound by {bound:?}, instead of {expected:?}:\n{}",
            first.bottleneck,
            report()
        );
        let is_right_rank = expected != Bottleneck::Straggler || first.evidence[0].contains("rank 1");
        ensure!(is_right_rank, "the finding does not name rank 1, the slow one:\n{}", report());
        ensure!(self.scope.is_none() || first.scope.as_deref() == self.scope, "wrong scope:\n{}", report());
        Ok(())
    }
}

/// The part of a record that does not depend on times: one line for each number of steps, for each scope, and for each
/// operator with its number of calls. Two records of one loop must have the same lines.
pub fn timeless(run: &RunProfile) -> BTreeSet<String> {
    let mut lines = BTreeSet::new();
    let mut steps = |of: String, count: Option<u64>| lines.insert(format!("{of}: {count:?} steps"));
    steps("timed".to_owned(), run.steps.as_ref().map(|steps| steps.steps));
    for (rank, report) in run.ranks.iter().enumerate() {
        steps(format!("rank {rank}"), Some(report.steps));
    }
    let Some(profiled) = &run.profiled else { return lines };
    steps("profiled".to_owned(), Some(profiled.steps));
    lines.extend(profiled.scopes.iter().map(|scope| format!("scope {}", scope.name)));
    for op in profiled.ops.iter().filter(|op| op.name.starts_with("aten::")) {
        let scope = op.scope.as_deref().unwrap_or("-");
        // Calls per step, averaged over the profiled steps, hence with rounding errors.
        lines.insert(format!("{} in {} {scope}: {:.3} calls", op.name, op.phase, op.calls));
    }
    lines
}
