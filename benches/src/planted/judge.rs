//! Whether a run of a loop was judged right, and what of its record no busy machine changes.

use std::collections::BTreeSet;

use anyhow::{Context, Result, ensure};
use overdrive_profile::{Bottleneck, Diagnosis, RunProfile};

use super::Plant;

impl Plant {
    /// Whether the diagnosis of a run names what was planted, and names it first; of a healthy loop, whether it finds
    /// nothing. It follows the times in the record: of a run beside other programs it may be wrong.
    ///
    /// # Errors
    /// When it does not, with the whole diagnosis.
    pub fn judge(&self, run: &RunProfile) -> Result<()> {
        let diagnosis = Diagnosis::of(run);
        let report = || format!("{}\n{diagnosis:#?}", run.steps.as_ref().map_or(String::new(), ToString::to_string));
        let (expected, bound) = (self.bottleneck, diagnosis.bound_by);
        if self.is_healthy() {
            ensure!(diagnosis.findings.is_empty(), "a false alarm:\n{}", report());
            let is_right = bound == Some(expected) || bound.is_some() && bound == self.or;
            ensure!(is_right, "not {expected:?} but {bound:?}:\n{}", report());
            return Ok(());
        }
        let first = diagnosis.findings.first().with_context(|| format!("nothing was found:\n{}", report()))?;
        let is_first = first.bottleneck == expected && bound == Some(expected);
        ensure!(is_first, "{:?} comes first:\n{}", first.bottleneck, report());
        let is_right_rank = expected != Bottleneck::Straggler || first.evidence[0].contains("rank 1");
        ensure!(is_right_rank, "not the slow rank:\n{}", report());
        ensure!(self.scope.is_none() || first.scope.as_deref() == self.scope, "not in its scope:\n{}", report());
        Ok(())
    }
}

/// What two records of one loop have in common however long each step took: a line for each number of steps, each scope, and
/// each operator of the thread that trains with its calls.
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
        // A sum of shares of a step, which is whole but for rounding.
        lines.insert(format!("{} in {} {scope}: {:.3} calls", op.name, op.phase, op.calls));
    }
    lines
}
