//! Waiting for other ranks.

use super::facts::Facts;
use super::finding::{Bottleneck, Finding};
use crate::{HostGap, Phase, Straggler, stragglers};

/// Robust standard deviations between a rank and the others.
const DEVIATIONS: f64 = 3.0;

pub(super) fn findings(facts: &Facts<'_>) -> Vec<Finding> {
    let slow = slow_rank(facts);
    let late = slow.as_ref().map_or(0.0, |finding| finding.seconds_per_step);
    slow.into_iter().chain(communication(facts, late)).collect()
}

fn slow_rank(facts: &Facts<'_>) -> Option<Finding> {
    // Reports with times that are none are nobody's.
    let slow = stragglers(&facts.run.ranks, DEVIATIONS).ok()?;
    // Those who wait for a slow rank are slow themselves, where they wait: in backward, or where a metric is exchanged.
    let waits = [Phase::Backward, Phase::Other];
    let first: &Straggler = slow.iter().find(|it| !waits.contains(&it.phase)).or(slow.first())?;
    let of_rank: Vec<_> = slow.iter().filter(|it| it.rank == first.rank).collect();
    let seconds = of_rank.iter().map(|it| it.excess_seconds()).sum();
    let mut finding = facts.finding(Bottleneck::Straggler, seconds)?;
    for it in of_rank {
        finding = finding.evidence(format!(
            "rank {} takes {:.2} ms in the phase `{}`, the others {:.2} ms",
            it.rank,
            1e3 * it.seconds,
            it.phase,
            1e3 * it.typical_seconds
        ));
    }
    Some(finding.remedy(format!(
        "look at rank {}: its data (uneven shards, longer samples: `DistributedSampler`, buckets by length), other programs on its \
         host, its GPU's clocks",
        first.rank
    )))
}

/// What is left when nobody is late.
fn communication(facts: &Facts<'_>, late_seconds: f64) -> Option<Finding> {
    if facts.run.world_size < 2 {
        return None;
    }
    let marked = facts.seconds(Phase::Communication);
    let profiled = facts.profiled();
    let within = |phase: Phase| {
        let Some(times) = profiled.and_then(|it| it.phase(phase)) else { return 0.0 };
        // Within backward, whatever is no operator is waiting for buckets.
        let is_wait = |gap: &&HostGap| phase == Phase::Backward && gap.phase == phase;
        let pauses = profiled.into_iter().flat_map(|it| &it.gaps).filter(is_wait).map(|gap| gap.seconds);
        let waits = times.communication_seconds + pauses.sum::<f64>();
        // Ranks do not start their profilers at the same time: no more than what operators leave over without one.
        let waits = waits.min((facts.seconds(phase) - times.operator_seconds).max(0.0));
        facts.unprofiled(phase, waits + times.exchange_operator_seconds, 0.0)
    };
    let backward = within(Phase::Backward);
    let elsewhere: f64 = [Phase::Forward, Phase::Optimizer, Phase::Other].map(within).iter().sum();
    let seconds = marked + backward + elsewhere - late_seconds;
    // Where ranks wait for CPUs, they wait for one another.
    facts.finding(Bottleneck::Communication, seconds - facts.queued_seconds())?;
    let finding = facts.finding(Bottleneck::Communication, seconds)?;
    Some(
        finding
            .op(Some("all_reduce"))
            .evidence(format!(
                "exchanges take {}: {:.2} ms in backward, {:.2} ms in the phase `communication`",
                facts.of_step(seconds),
                1e3 * backward,
                1e3 * marked
            ))
            .remedy(
                "send less, or less often: `ddp.register_comm_hook(CastCompress::bfloat16(&group))?` or `PowerSgd`, `no_sync` with an `Accumulator`, \
                 local SGD; larger batches a rank hide more",
            ),
    )
}
