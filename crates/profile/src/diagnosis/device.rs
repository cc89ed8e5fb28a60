//! What a GPU waits for, and what it could do faster.

use super::arithmetic::is_arithmetic;
use super::facts::{Facts, mean};
use super::finding::{Bottleneck, Finding};
use super::host::most_called;
use super::kernels::{self, copies_from_pageable, copies_to_device, copies_to_host, is_float32_product};
use super::memory::{gpu_indices, of_gpu};
use super::places::main_part;
use super::throttling::throttling;
use crate::{OpTimes, Phase, ProfiledSteps, ScopeTimes};

/// How much of their time float32 products keep on tensor cores: NVIDIA gives TF32 8 times the rate of float32 on A100 (156 and
/// 19.5 TFLOPS) and 7.4 times on H100 and H200 (494 and 67).
const TF32_SHARE: f64 = 1.0 / 7.4;
/// Phases in which the host and the device may wait: each has a rule of its own.
const WAITING: [Phase; 3] = [Phase::DataWait, Phase::HostToDevice, Phase::Communication];

pub(super) fn findings(facts: &Facts<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    let profiled = facts.profiled();
    let offload = profiled.filter(|_| facts.run.machine.has_gpu()).and_then(|profiled| offload(facts, profiled));
    found.extend(copies(facts, profiled, offload.is_some()));
    found.extend(throttling(facts));
    found.extend(offload);
    let Some(profiled) = profiled.filter(|_| facts.run.machine.has_gpu()) else { return found };
    found.extend(float32_products(facts, profiled));
    found.extend(idle(facts, profiled));
    found
}

/// From the host to the device. Where no phase is marked, what the copies from pageable memory take themselves: the host waits
/// for those.
fn copies(facts: &Facts<'_>, profiled: Option<&ProfiledSteps>, is_offload: bool) -> Option<Finding> {
    let marked = facts.seconds(Phase::HostToDevice);
    let work = || profiled.into_iter().flat_map(|it| &it.device_work);
    let pageable: Vec<_> = work().filter(|it| copies_from_pageable(&it.name)).collect();
    let unmarked = if is_offload { 0.0 } else { pageable.iter().map(|it| it.seconds).sum() };
    let seconds = if marked > 0.0 { marked } else { unmarked };
    let finding = facts.finding(Bottleneck::HostToDevice, seconds)?;
    let longest = pageable.first().copied().or_else(|| work().find(|it| copies_to_device(&it.name)));
    let finding = finding
        .op(longest.map(|copy| copy.name.as_str()))
        .scope(if marked > 0.0 { facts.scope_of_phases(&[Phase::HostToDevice]) } else { scope_of_copies(facts) })
        .evidence(format!("copies to the device take {}", facts.of_step(seconds)));
    Some(if pageable.is_empty() {
        finding.remedy(
            "`.to_device(device)` on the loader copies beside the steps; send bytes and make floats on the device (`ToFloat`)",
        )
    } else {
        finding
            .evidence(format!(
                "{:.1} copies a step are from pageable memory: the host waits for them, and they go through a buffer",
                pageable.iter().map(|it| it.calls).sum::<f64>()
            ))
            .remedy("`.pin_memory(true).to_device(device)` on the loader copies from pinned memory, beside the steps")
    })
}

/// Where the host copies between itself and the device, outside of the phases that are for that.
fn scope_of_copies<'a>(facts: &Facts<'a>) -> Option<&'a str> {
    let is_copy = |op: &OpTimes| op.name == "aten::copy_" && !WAITING.contains(&op.phase);
    facts.scope_of_ops(|op| if is_copy(op) { op.device_seconds } else { 0.0 })
}

/// Tensors that leave the device within a step and come back.
fn offload(facts: &Facts<'_>, profiled: &ProfiledSteps) -> Option<Finding> {
    let sum = |is_copy: fn(&str) -> bool| {
        let copies = profiled.device_work.iter().filter(|it| is_copy(&it.name));
        copies.map(|it| it.seconds).sum::<f64>()
    };
    let (out, back) = (sum(copies_to_host), sum(copies_to_device));
    let batch = profiled.phase(Phase::HostToDevice).map_or(0.0, |phase| phase.seconds);
    let both = out + (back - batch).max(0.0);
    if out < 0.3 * both {
        return None;
    }
    let finding = facts.finding(Bottleneck::Offload, both)?;
    let is_copy = |it: &&ScopeTimes| copies_to_host(&it.name) || copies_to_device(&it.name);
    Some(
        finding
            .op(profiled.device_work.iter().find(is_copy).map(|copy| copy.name.as_str()))
            .scope(scope_of_copies(facts))
            .evidence(format!(
                "{:.2} ms of copies to the host and {:.2} ms back in a step of {:.2} ms",
                1e3 * out,
                1e3 * back,
                1e3 * facts.step_seconds
            ))
            .remedy(
                "keep what fits on the device: smaller batches with `Accumulator`, autocast, 8-bit optimizer state; what has \
                 to go should go through pinned memory, beside the computation",
            ),
    )
}

/// Products in float32 by kernels that use no tensor cores.
fn float32_products(facts: &Facts<'_>, profiled: &ProfiledSteps) -> Option<Finding> {
    let kernels: Vec<_> = profiled.device_work.iter().filter(|it| is_float32_product(&it.name)).collect();
    let longest = kernels.first()?;
    let seconds = kernels.iter().map(|it| it.seconds).sum::<f64>();
    let share = seconds / facts.step_seconds;
    let seconds = seconds * (1.0 - TF32_SHARE);
    let finding = facts.finding(Bottleneck::Float32Matmul, seconds)?;
    let mut finding = finding
        .op(Some(&longest.name))
        .scope(facts.scope_of_ops(|op| if is_arithmetic(&op.name) { op.device_seconds } else { 0.0 }))
        .evidence(format!("products of float32 take {:.0}% of a step", 100.0 * share))
        .remedy(
            "`autocast(device, Kind::BFloat16, || ..)` around the forward pass; or `set_allow_tf32(true)` where float32 has to \
             stay",
        );
    for gpu in gpu_indices(facts) {
        let samples = facts.samples.iter().filter_map(|sample| of_gpu(sample, gpu)?.tensor_utilization);
        if let Some(busy) = mean(samples) {
            let figure = format!("tensor cores of GPU {gpu} are at work for {:.0}% of the time", 100.0 * busy);
            finding = finding.evidence(figure);
        }
    }
    Some(finding)
}

/// The device has nothing to do: the host waits for it, or does not hand work out fast enough.
fn idle(facts: &Facts<'_>, profiled: &ProfiledSteps) -> Option<Finding> {
    // The profiler holds the host up, not the device.
    let idle = facts.step_seconds - profiled.device_busy_seconds?;
    let seconds = idle - WAITING.map(|phase| facts.seconds(phase)).iter().sum::<f64>();
    let evidence = format!("the GPU does nothing for {}", facts.of_step(idle));
    match Waits::of(profiled) {
        Some(waits) => waits.finding(facts, seconds, evidence),
        None => launches(facts, profiled, seconds, evidence),
    }
}

/// Waits of the host for the device in each step.
struct Waits<'a> {
    /// The calls, or what reads numbers where no call was recorded.
    places: Vec<&'a OpTimes>,
    calls: f64,
    /// Whether numbers are read out of tensors where it waits.
    reads: bool,
}

impl<'a> Waits<'a> {
    fn of(profiled: &'a ProfiledSteps) -> Option<Self> {
        let own = || profiled.ops.iter().filter(|op| !WAITING.contains(&op.phase));
        let is_read = |op: &&OpTimes| op.name == "aten::_local_scalar_dense";
        // Reading a number of a tensor on the host waits for nobody.
        let sees_calls = profiled.ops.iter().any(|op| kernels::is_call(&op.name));
        let places: Vec<_> =
            own().filter(|op| if sees_calls { kernels::waits(&op.name) } else { is_read(op) }).collect();
        let calls = places.iter().map(|op| op.calls).sum();
        let is_there = |read: &OpTimes| places.iter().any(|op| op.phase == read.phase && op.scope == read.scope);
        let reads =
            own().filter(is_read).filter(|read| is_there(read)).map(|read| read.calls).sum::<f64>() >= 0.5 * calls;
        (calls >= 0.9).then_some(Self { places, calls, reads })
    }

    fn finding(&self, facts: &Facts<'_>, seconds: f64, evidence: String) -> Option<Finding> {
        let by = |weight: fn(&OpTimes) -> f64| {
            main_part(self.places.iter().map(|op| (op.scope.as_deref(), weight(op)))).flatten()
        };
        let scope = by(|op| op.self_cpu_seconds).or_else(|| by(|op| op.calls));
        let longest = self.places.iter().max_by(|one, other| one.self_cpu_seconds.total_cmp(&other.self_cpu_seconds));
        let finding = facts.finding(Bottleneck::HostSync, seconds)?;
        let finding = finding.op(if self.reads { Some("aten::item") } else { longest.map(|op| op.name.as_str()) });
        let figure = format!("the host waits for the device {:.0} times a step", self.calls);
        Some(finding.scope(scope).evidence(evidence).evidence(figure).remedy(if self.reads {
            "read numbers less often: add losses up on the device (`total += &loss.detach()`), and \
             `total.double_value(&[])` every 100 steps"
        } else {
            "wait less often: copies to the host every 100 steps, or from a pinned tensor and without waiting; shapes that \
             depend on values (`nonzero`, masks as indices) wait as well; `tch::Cuda::synchronize` has no place in a step"
        }))
    }
}

/// Nobody waits for the device: the host is too slow.
fn launches(facts: &Facts<'_>, profiled: &ProfiledSteps, seconds: f64, evidence: String) -> Option<Finding> {
    let finding = facts.finding(Bottleneck::KernelLaunches, seconds)?;
    let operators: f64 = profiled.phases.iter().map(|phase| phase.operators).sum();
    let call = most_called(profiled, |op| kernels::launches(&op.name));
    let is_launch = |op: &OpTimes| match call {
        Some(_) => kernels::launches(&op.name),
        None => !WAITING.contains(&op.phase),
    };
    let mut finding = finding
        .op(call.map(|(name, _)| name))
        .scope(facts.scope_of_ops(|op| if is_launch(op) { op.calls } else { 0.0 }))
        .evidence(evidence)
        .evidence(format!("the host hands out {operators:.0} operators a step"))
        .remedy("do more in each operator: larger batches, fused optimizers (`.fused(true)`), `channels_last`");
    if let Some((name, calls)) = call {
        finding = finding.evidence(format!("{calls:.0} calls of {name} a step"));
    }
    Some(finding)
}
