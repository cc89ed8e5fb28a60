//! What is kept of each rank when the records of all ranks are merged.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use super::{HostGap, OpTimes, RunProfile, StepTimes};
use crate::{Finding, Phase};

/// Smaller differences, as a share of a step, are ignored, as in [`stragglers`](crate::stragglers()).
const LEAST_SHARE: f64 = 0.02;
/// How many rows of operators and of gaps are kept of each rank.
const MOST_ROWS: usize = 30;

/// One of several ranks.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct RankInfo {
    /// Its number.
    pub rank: u64,
    /// The name of its machine in the network.
    pub host: String,
    /// The share of the time in which its training thread was ready to run, but waited for a CPU, from 0 to 1. None if
    /// threads were not sampled.
    pub queued_share: Option<f64>,
    /// For each phase, in the order of [`Phase::ALL`]: the share of the steps in which the rank took longer than the
    /// typical rank, by 2% of a step or more. Empty if there is no step that all ranks have.
    pub slow_steps: Vec<f64>,
    /// The operators that took longest, as in [`ProfiledSteps::ops`](super::ProfiledSteps::ops).
    pub ops: Vec<OpTimes>,
    /// Findings about its machine: memory that grows or is too small, throttled clocks.
    #[serde(default)]
    pub findings: Vec<Finding>,
    /// The longest gaps, as in [`ProfiledSteps::gaps`](super::ProfiledSteps::gaps).
    pub gaps: Vec<HostGap>,
}

impl RankInfo {
    /// One for each record.
    pub(super) fn of(runs: &[&RunProfile]) -> Vec<Self> {
        let slow = slow_steps(runs);
        let info = |(place, run): (usize, &&RunProfile)| {
            let profiled = run.profiled.as_ref();
            Self {
                rank: run.rank,
                host: run.machine.host.clone(),
                queued_share: crate::diagnosis::queued_share(run),
                slow_steps: slow.get(place).cloned().unwrap_or_default(),
                ops: profiled.into_iter().flat_map(|it| it.ops.iter().take(MOST_ROWS).cloned()).collect(),
                findings: crate::diagnosis::of_machine(run),
                gaps: profiled.into_iter().flat_map(|it| it.gaps.iter().take(MOST_ROWS).cloned()).collect(),
            }
        };
        runs.iter().enumerate().map(info).collect()
    }
}

impl RunProfile {
    /// The number of the rank whose report has this index in `ranks`.
    pub fn rank_number(&self, place: usize) -> u64 {
        self.rank_info.get(place).map_or(place as u64, |info| info.rank)
    }

    /// Whether the ranks ran on several hosts.
    pub(crate) fn are_ranks_on_hosts(&self) -> bool {
        self.rank_info.windows(2).any(|pair| pair[0].host != pair[1].host)
    }

    /// The ranks that have no report in `ranks`, by name. None if no rank is known to be missing; older records do not
    /// contain the ranks' numbers.
    pub(crate) fn missing_ranks(&self) -> Option<String> {
        let present: Vec<_> = self.rank_info.iter().map(|info| info.rank).collect();
        missing(self.world_size, &present).filter(|_| !present.is_empty())
    }
}

/// "rank 1, rank 3"; of many, the first few and the number of the others. None if no rank of `size` is missing.
pub(super) fn missing(size: u64, present: &[u64]) -> Option<String> {
    const MOST: usize = 8;
    let named: Vec<_> = (0..size).filter(|rank| !present.contains(rank)).take(MOST).collect();
    let known = present.iter().filter(|rank| **rank < size).count() + named.len();
    let more = size.saturating_sub(known as u64);
    let names: Vec<_> = named.iter().map(|rank| format!("rank {rank}")).collect();
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    (!names.is_empty()).then(|| names.join(", ") + &more)
}

/// The share of slow steps by rank and phase; empty if the ranks have no step in common.
fn slow_steps(runs: &[&RunProfile]) -> Vec<Vec<f64>> {
    let on_device = runs.iter().all(|run| run.steps.as_ref().is_some_and(|steps| steps.device.is_some()));
    let times = |run: &RunProfile| -> HashMap<u64, Vec<f64>> {
        let timed = run.step_times.iter().filter(|step| !step.is_profiled);
        timed.filter_map(|step| Some((step.step, phases(step, on_device)?))).collect()
    };
    let times: Vec<_> = runs.iter().map(|run| times(run)).collect();
    let Some((first, others)) = times.split_first().filter(|(_, others)| !others.is_empty()) else { return Vec::new() };
    let common: Vec<Vec<&Vec<f64>>> = first
        .iter()
        .filter_map(|(number, step)| {
            let others = others.iter().map(|of_rank| of_rank.get(number));
            std::iter::once(Some(step)).chain(others).collect()
        })
        .collect();
    if common.is_empty() {
        return Vec::new();
    }
    let least = LEAST_SHARE * typical(common.iter().map(|step| step[0].iter().sum()).collect());
    let is_slow = |step: &[&Vec<f64>], rank: usize, phase: usize| {
        let of_phase = |times: &&Vec<f64>| times.get(phase).copied().unwrap_or(0.0);
        of_phase(&step[rank]) > typical(step.iter().map(of_phase).collect()) + least
    };
    let share = |rank: usize, phase: usize| {
        let slow = common.iter().filter(|step| is_slow(step, rank, phase)).count();
        slow as f64 / common.len() as f64
    };
    (0..runs.len()).map(|rank| (0..Phase::ALL.len()).map(|phase| share(rank, phase)).collect()).collect()
}

fn phases(step: &StepTimes, on_device: bool) -> Option<Vec<f64>> {
    if on_device { step.device_seconds.clone() } else { Some(step.host_seconds.clone()) }
}

/// The lower median.
fn typical(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times.get(times.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}
