//! Findings about the host: operators, and the program's own code between them.

use std::collections::BTreeMap;

use super::LEAST_SHARE;
use super::arithmetic::is_arithmetic;
use super::facts::Facts;
use super::finding::{Bottleneck, Finding};
use super::optimizers;
use crate::{HostGap, OpTimes, Phase, PhaseTimes, ProfiledSteps};

/// Fewer small calls per phase and step cost little.
const MANY_CALLS: f64 = 500.0;
/// Operators of hand-written optimizers and of tch's. Fused and foreach implementations use others.
const UPDATES: [&str; 6] =
    ["aten::addcdiv_", "aten::addcmul_", "aten::lerp_", "aten::add_", "aten::sub_", "aten::mul_"];

pub(super) fn findings(facts: &Facts<'_>) -> Vec<Finding> {
    let Some(profiled) = facts.profiled() else { return Vec::new() };
    let mut found = Vec::new();
    found.extend(read_back_loop(facts));
    found.extend(optimizer_loop(facts, profiled));
    found.extend(tiny_operators(facts, profiled));
    found.extend(own_code(facts, profiled));
    found
}

/// What bounds a run without findings. None if no operator was recorded.
pub(super) fn healthy(facts: &Facts<'_>) -> Option<Bottleneck> {
    let ops = &facts.profiled()?.ops;
    let seconds = |op: &OpTimes| if facts.run.machine.has_gpu() { op.device_seconds } else { op.self_cpu_seconds };
    let whole: f64 = ops.iter().map(seconds).sum();
    let arithmetic: f64 = ops.iter().filter(|op| is_arithmetic(&op.name)).map(seconds).sum();
    let bound = if arithmetic >= 0.5 * whole { Bottleneck::Compute } else { Bottleneck::MemoryBandwidth };
    (whole > 0.0).then_some(bound)
}

fn read_back_loop(facts: &Facts<'_>) -> Option<Finding> {
    let loops: Vec<_> = facts.read_back_loops().collect();
    let longest = loops.first()?;
    let seconds = loops.iter().map(|it| facts.unprofiled(it.phase, it.seconds, it.operators)).sum();
    let finding = facts.finding(Bottleneck::HostLoop, seconds)?;
    Some(
        finding
            .scope(longest.scope.as_deref())
            .op(Some("aten::item"))
            .evidence(format!(
                "{:.0} numbers per step are read out of tensors one by one{}, which takes {}",
                longest.calls,
                place(longest),
                facts.of_step(seconds)
            ))
            .remedy(
                "write the loop as operators over whole tensors, and read a single number at its end: \
                 `loss.double_value(&[])`",
            ),
    )
}

fn optimizer_loop(facts: &Facts<'_>, profiled: &ProfiledSteps) -> Option<Finding> {
    let phase = profiled.phase(Phase::Optimizer)?;
    let is_loop = phase.small_calls >= MANY_CALLS / 2.0 && is_mostly_calls(phase);
    if !is_loop {
        return None;
    }
    let most = most_called(profiled, |op| op.phase == Phase::Optimizer && UPDATES.contains(&op.name.as_str()));
    let seconds = facts.seconds(Phase::Optimizer);
    let finding = facts.finding(Bottleneck::OptimizerLoop, seconds)?;
    Some(
        finding
            .op(most.map(|(name, _)| name))
            .scope(facts.scope_of_phases(&[Phase::Optimizer]))
            .evidence(format!("the optimizer takes {}", facts.of_step(seconds)))
            .evidence(format!(
                "it makes {:.0} small calls of operators per step, of {:.1} us each under the profiler",
                phase.small_calls,
                1e6 * phase.small_call_seconds / phase.small_calls
            ))
            .remedy(optimizers::remedy(profiled)),
    )
}

fn tiny_operators(facts: &Facts<'_>, profiled: &ProfiledSteps) -> Option<Finding> {
    if facts.run.machine.has_gpu() {
        // On a GPU, its idle time shows this: see `device`.
        return None;
    }
    let phases = [Phase::Forward, Phase::Backward, Phase::Other].into_iter().filter_map(|phase| profiled.phase(phase));
    let tiny: Vec<_> = phases.filter(|times| times.small_calls >= MANY_CALLS && is_mostly_calls(times)).collect();
    // Calls within a loop over numbers belong to that finding.
    let read_back =
        |phase: Phase| facts.read_back_loops().filter(|it| it.phase == phase).map(|it| it.seconds).sum::<f64>();
    let own = |times: &&PhaseTimes| facts.unprofiled_share(times.phase, small_seconds(times) - read_back(times.phase));
    let seconds: f64 = tiny.iter().map(own).sum();
    let operators: f64 = tiny.iter().map(|times| times.small_calls).sum();
    let operator_seconds: f64 = tiny.iter().map(|times| times.small_call_seconds).sum();
    let phases: Vec<_> = tiny.iter().map(|times| times.phase.name()).collect();
    let is_tiny = |op: &OpTimes| tiny.iter().any(|times| times.phase == op.phase);
    let most = most_called(profiled, is_tiny);
    let finding = facts.finding(Bottleneck::KernelLaunches, seconds)?;
    Some(
        finding
            .op(most.map(|(name, _)| name))
            .scope(facts.scope_of_ops(|op| if is_tiny(op) { op.calls } else { 0.0 }))
            .evidence(format!(
                "{operators:.0} small calls of operators per step, of {:.1} us each under the profiler, in: {}",
                1e6 * operator_seconds / operators,
                phases.join(", ")
            ))
            .remedy(
                "do more in each operator: larger batches, whole tensors instead of loops over rows or time steps; or \
                 compile the step, which fuses operators: `compile::step` of overdrive-compile",
            ),
    )
}

/// Time between operators that no other rule covers.
fn own_code(facts: &Facts<'_>, profiled: &ProfiledSteps) -> Option<Finding> {
    // With a GPU, the host has pauses in the other phases because it waits for the GPU.
    let phases: &[Phase] = match facts.run.machine.has_gpu() {
        true => &[Phase::Other],
        false => &[Phase::Forward, Phase::Backward, Phase::Optimizer, Phase::Other],
    };
    // With several ranks, pauses of the backward pass are communication.
    let is_own =
        |gap: &&HostGap| phases.contains(&gap.phase) && !(gap.phase == Phase::Backward && facts.run.world_size > 1);
    let gaps: Vec<_> = profiled.gaps.iter().filter(|gap| is_own(gap) && gap.typical() > 0.0).collect();
    // Work that is not done in every step may not have been done while the profiler was on.
    let seen = profiled.phase(Phase::Other).map_or(0.0, |times| times.seconds);
    let unseen = (facts.seconds(Phase::Other) - seen).max(0.0);
    let unseen = if unseen >= LEAST_SHARE * facts.step_seconds { unseen } else { 0.0 };
    let pauses: f64 = gaps.iter().map(|gap| facts.unprofiled(gap.phase, gap.typical(), 0.0)).sum();
    // A thread that waits for a CPU pauses too, longer in some steps than in others. In the profiled steps, all of its
    // waiting may have been in these pauses.
    let on_cpu = 1.0 - facts.queued_seconds() / facts.step_seconds;
    let all: f64 = gaps.iter().map(|gap| gap.typical()).sum();
    let certain = profiled.queued_seconds.map_or(on_cpu * pauses, |waited| (all - waited).clamp(0.0, pauses));
    let certain = on_cpu * unseen + certain;
    facts.finding(Bottleneck::HostCode, certain)?;
    // The finding reports the gain at best.
    let waited = unseen + pauses - certain;
    let mut finding = facts.finding(Bottleneck::HostCode, unseen + pauses)?;
    if let Some(longest) = gaps.first().filter(|_| pauses > unseen) {
        let most = format!("no operator runs for {}, most of it{}", facts.of_step(pauses), place(longest));
        finding = finding.scope(longest.scope.as_deref()).evidence(most);
    }
    if unseen > 0.0 {
        finding = finding.evidence(format!(
            "{} in the phase `other` were not in the profiled steps: something that is done now and then",
            facts.of_step(unseen)
        ));
    }
    finding = finding.evidence_if(waited >= 0.01 * facts.step_seconds, || {
        format!("{:.2} ms of that may be waiting for a CPU", 1e3 * waited)
    });
    let written = facts.samples.iter().filter_map(|it| it.process?.rates?.disk_written_bytes_per_second);
    let written = super::facts::mean(written).filter(|bytes| *bytes >= 1e5);
    finding = finding.remedy(
        "do it less often or on another thread: buffer logs and do not sync them (`flush` at the end of an epoch), \
             write checkpoints by `Checkpoint`, in the background; to see which part it is, put \
             `record_function(\"name\")` around parts of the loop",
    );
    if let Some(main) = facts.main_thread() {
        finding =
            finding.evidence(format!("the training thread is on a CPU for {:.0}% of the time", 100.0 * main.busy));
    }
    if let Some(bytes) = written {
        finding = finding.evidence(format!("the process writes {:.1} MB/s to disks", bytes / 1e6));
    }
    Some(finding)
}

/// The operator that is called most often, and how often, counting only entries that pass.
pub(super) fn most_called(profiled: &ProfiledSteps, passes: impl Fn(&OpTimes) -> bool) -> Option<(&str, f64)> {
    let mut calls: BTreeMap<&str, f64> = BTreeMap::new();
    for op in profiled.ops.iter().filter(|op| passes(op)) {
        *calls.entry(&op.name).or_default() += op.calls;
    }
    calls.into_iter().max_by(|one, other| one.1.total_cmp(&other.1))
}

/// Whether small calls are half or more of what a phase does. Large models have many small calls too, but they do more
/// besides.
fn is_mostly_calls(times: &PhaseTimes) -> bool {
    small_seconds(times) >= 0.5 * (times.operator_seconds + times.short_pause_seconds)
}

/// Seconds of small calls, and of the short pauses between them.
fn small_seconds(times: &PhaseTimes) -> f64 {
    let share = if times.calls > 0.0 { times.small_calls / times.calls } else { 0.0 };
    times.small_call_seconds + share * times.short_pause_seconds
}

/// " in the scope `logging`, phase `other`".
fn place(gap: &HostGap) -> String {
    match &gap.scope {
        Some(scope) => format!(" in the scope `{scope}`, phase `{}`", gap.phase),
        None => format!(" in the phase `{}`", gap.phase),
    }
}
