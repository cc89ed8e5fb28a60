//! Findings about ranks that wait for each other.

use std::collections::BTreeMap;

use super::LEAST_SHARE;
use super::facts::Facts;
use super::finding::{Bottleneck, Finding};
use super::places::{host_times, main_part};
use crate::{HostGap, Phase, Straggler};

/// A slow rank is slow in at least this share of the steps. Otherwise different ranks are slow at different times.
const STEADY: f64 = 0.8;
/// Phases in which ranks wait for a slow rank, and so take long themselves: the backward pass, and `other`, where
/// metrics may be exchanged.
const WAITS: [Phase; 2] = [Phase::Backward, Phase::Other];

pub(super) fn findings(facts: &Facts<'_>) -> Vec<Finding> {
    let slow = slow_rank(facts);
    let late = slow.as_ref().map_or(0.0, |finding| finding.seconds_per_step);
    slow.into_iter().chain(communication(facts, late)).collect()
}

/// Ranks that are slow but not a finding, and ranks that wait for a CPU.
pub(super) fn notes(facts: &Facts<'_>) -> Vec<String> {
    let of_finding = slow_rank(facts).is_some();
    let others = candidates(facts).into_iter().filter(|_| !of_finding);
    let slow = others.filter(|slow| slow.seconds >= LEAST_SHARE * facts.step_seconds);
    let reasons = slow.filter_map(|slow| slow.why_not_reported(facts));
    let others = facts.run.rank_info.iter().filter(|info| info.rank != facts.run.rank);
    let queued = others.filter_map(|info| Some((info.rank, info.queued_share.filter(|share| *share >= LEAST_SHARE)?)));
    let waits = queued.map(|(rank, share)| {
        format!("the training thread of rank {rank} waited for a CPU for {:.0}% of the time", 100.0 * share)
    });
    reasons.chain(waits).collect()
}

/// A rank that takes longer than the others.
struct Slow<'a> {
    /// The index of its report.
    place: usize,
    /// The phases in which it takes longer.
    phases: Vec<&'a Straggler>,
    /// The one with the largest excess, preferably one in which ranks do not wait for each other.
    worst: Phase,
    /// Seconds of a step by which it exceeds the typical rank, over all of these phases.
    seconds: f64,
    /// Seconds of a step by which it waited longer for a CPU than the rank that waited least. If ranks are slow only in
    /// phases in which they wait for each other, the longest wait of any rank.
    queued_seconds: f64,
    /// The share of the steps in which it is slow in the worst phase. None if unknown.
    steady: Option<f64>,
}

fn slow_rank(facts: &Facts<'_>) -> Option<Finding> {
    let ranks = candidates(facts);
    let slow = ranks.iter().find(|slow| slow.is_its_own_fault(facts))?;
    slow.finding(facts)
}

/// Slow ranks, the slowest first. Ranks that are slow only where ranks wait for each other count only if there are no
/// others.
fn candidates<'a>(facts: &'a Facts<'_>) -> Vec<Slow<'a>> {
    let all = &facts.stragglers;
    let is_wait = |it: &&Straggler| WAITS.contains(&it.phase);
    let mut places: Vec<usize> = Vec::new();
    let waits_count = all.iter().all(|it| is_wait(&it));
    for it in all.iter().filter(|it| waits_count || !is_wait(it)) {
        if !places.contains(&it.rank) {
            places.push(it.rank);
        }
    }
    let queued = |place: usize| facts.rank_queued_seconds(place);
    let of = |place: usize| {
        let phases: Vec<_> = all.iter().filter(|it| it.rank == place).collect();
        let others: Vec<f64> = (0..facts.run.ranks.len()).filter(|it| *it != place).map(queued).collect();
        let least = others.iter().copied().fold(f64::INFINITY, f64::min);
        let most = others.iter().copied().fold(queued(place), f64::max);
        let info = facts.run.rank_info.get(place);
        let worst = phases.iter().find(|it| waits_count || !is_wait(it))?.phase;
        Some(Slow {
            place,
            worst,
            seconds: phases.iter().map(|it| it.excess_seconds()).sum(),
            queued_seconds: if waits_count { most } else { (queued(place) - least).max(0.0) },
            steady: info.and_then(|info| info.slow_steps.get(worst as usize)).copied(),
            phases,
        })
    };
    places.into_iter().filter_map(of).collect()
}

impl Slow<'_> {
    fn is_steady(&self) -> bool {
        self.steady.is_none_or(|share| share >= STEADY)
    }

    /// False if it is slow only in some steps, or only because it waits for a CPU: then its machine is busy.
    fn is_its_own_fault(&self, facts: &Facts<'_>) -> bool {
        self.is_steady() && facts.finding(Bottleneck::Straggler, self.seconds - self.queued_seconds).is_some()
    }

    /// Why it is not a finding.
    fn why_not_reported(&self, facts: &Facts<'_>) -> Option<String> {
        let rank = facts.run.rank_number(self.place);
        let slow = format!("rank {rank} takes {:.2} ms per step longer than the others", 1e3 * self.seconds);
        match self.steady.filter(|_| !self.is_steady()) {
            Some(share) => Some(format!(
                "{slow}, but is slow in the phase `{}` in only {:.0}% of the steps: no rank is slow throughout",
                self.worst,
                100.0 * share
            )),
            None => (!self.is_its_own_fault(facts)).then(|| {
                format!(
                    "{slow}, but ranks wait for a CPU for {:.2} ms of that: the machine{} is busy with something else",
                    1e3 * self.queued_seconds,
                    facts.run.rank_info.get(self.place).map_or(String::new(), |info| format!(" {}", info.host))
                )
            }),
        }
    }

    fn finding(&self, facts: &Facts<'_>) -> Option<Finding> {
        let rank = facts.run.rank_number(self.place);
        let (scope, op) = self.where_it_is_slow(facts);
        let mut finding = facts.finding(Bottleneck::Straggler, self.seconds)?.scope(scope).op(op);
        for it in &self.phases {
            finding = finding.evidence(format!(
                "rank {rank} takes {:.2} ms in the phase `{}`, the others {:.2} ms",
                1e3 * it.seconds,
                it.phase,
                1e3 * it.typical_seconds
            ));
        }
        if let Some(share) = self.steady {
            let figure = format!("it is slower in the phase `{}` in {:.0}% of the steps", self.worst, 100.0 * share);
            finding = finding.evidence(figure);
        }
        if let Some(missing) = facts.run.missing_ranks() {
            finding = finding.evidence(format!("there is no record of {missing}"));
        }
        let host = facts.run.rank_info.get(self.place).filter(|_| facts.run.are_ranks_on_hosts());
        let host = host.map_or(String::new(), |info| format!(" on {}", info.host));
        Some(finding.remedy(format!(
            "look at rank {rank}{host}: its data (uneven shards, longer samples: `DistributedSampler`, buckets by \
             length), work that only this rank does, its GPU's clocks"
        )))
    }

    /// The scope and the operator that make up most of the excess over the typical rank.
    fn where_it_is_slow<'a>(&self, facts: &Facts<'a>) -> (Option<&'a str>, Option<&'a str>) {
        let infos = &facts.run.rank_info;
        let Some(own) = infos.get(self.place) else { return (None, None) };
        let near = |place: &usize| -> f64 {
            let phase = |it: &&Straggler| facts.run.ranks[*place].phase(it.phase).map_or(0.0, |it| it.median_seconds);
            self.phases.iter().map(|it| (phase(it) - it.typical_seconds).abs()).sum()
        };
        let others = (0..infos.len().min(facts.run.ranks.len())).filter(|place| *place != self.place);
        let typical = others.min_by(|one, other| near(one).total_cmp(&near(other))).map(|place| &infos[place]);
        let is_slow = |phase: Phase| self.phases.iter().any(|it| it.phase == phase);
        let mut scopes: BTreeMap<Option<&str>, f64> = BTreeMap::new();
        let mut ops: BTreeMap<Option<&str>, f64> = BTreeMap::new();
        for (info, sign) in std::iter::once((own, 1.0)).chain(typical.map(|info| (info, -1.0))) {
            for (phase, scope, op, seconds) in host_times(&info.ops, &info.gaps) {
                if is_slow(phase) {
                    *scopes.entry(scope).or_default() += sign * seconds;
                    *ops.entry(op).or_default() += sign * seconds;
                }
            }
        }
        (main_part(scopes.into_iter()).flatten(), main_part(ops.into_iter()).flatten())
    }
}

/// Time of communication that is not explained by a slow rank, whose excess is `late_seconds`.
fn communication(facts: &Facts<'_>, late_seconds: f64) -> Option<Finding> {
    if facts.run.world_size < 2 {
        return None;
    }
    let marked = facts.seconds(Phase::Communication);
    let profiled = facts.profiled();
    let within = |phase: Phase| {
        let Some(times) = profiled.and_then(|it| it.phase(phase)) else { return 0.0 };
        // In the backward pass, pauses between operators are waits for buckets.
        let is_wait = |gap: &&HostGap| phase == Phase::Backward && gap.phase == phase;
        let pauses = profiled.into_iter().flat_map(|it| &it.gaps).filter(is_wait).map(HostGap::typical);
        let waits = times.communication_seconds + pauses.sum::<f64>();
        // Ranks do not start their profilers at the same time, which makes waits longer. They cannot exceed the
        // unprofiled phase less its operators.
        let waits = waits.min((facts.seconds(phase) - times.operator_seconds).max(0.0));
        (waits + times.exchange_operator_seconds).min(facts.seconds(phase))
    };
    let backward = within(Phase::Backward);
    let elsewhere: f64 = [Phase::Forward, Phase::Optimizer, Phase::Other].map(within).iter().sum();
    let seconds = marked + backward + elsewhere - late_seconds;
    // A rank that waits for a CPU makes the others wait.
    let of_others = (0..facts.run.ranks.len()).map(|place| facts.rank_queued_seconds(place)).fold(0.0, f64::max);
    let waited = facts.queued_seconds().max(of_others);
    facts.finding(Bottleneck::Communication, seconds - waited)?;
    let finding = facts.finding(Bottleneck::Communication, seconds)?;
    let exchanges = profiled.into_iter().flat_map(|it| &it.ops).filter(|op| is_exchange(&op.name));
    let longest = main_part(exchanges.map(|op| (op.name.as_str(), op.self_cpu_seconds)));
    let phase = if marked >= backward.max(elsewhere) { Phase::Communication } else { Phase::Backward };
    Some(
        finding
            .op(longest)
            .scope(facts.scope_of_phases(&[phase]))
            .evidence(format!(
                "communication takes {}: {:.2} ms in backward, {:.2} ms in the phase `communication`",
                facts.of_step(seconds),
                1e3 * backward,
                1e3 * marked
            ))
            .evidence_if(waited >= 0.01 * facts.step_seconds, || {
                format!("{:.2} ms of that may be waiting for CPUs", 1e3 * waited)
            })
            .remedy(
                "send less, or less often: `ddp.register_comm_hook(CastCompress::bfloat16(&group))?` or `PowerSgd`, \
                 `no_sync` with an `Accumulator`, local SGD; larger batches per rank hide more of it",
            ),
    )
}

/// Whether a profile's operator is a collective of a backend.
fn is_exchange(op: &str) -> bool {
    ["gloo:", "nccl:", "c10d::"].iter().any(|start| op.starts_with(start))
}
