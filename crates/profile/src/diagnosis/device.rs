//! What a GPU waits for, and what it could do faster.

use super::facts::Facts;
use super::finding::{Bottleneck, Finding};
use crate::{Phase, ProfiledSteps, ScopeTimes};

/// How much of their time float32 products keep on tensor cores: NVIDIA gives TF32 8 times the rate of float32 on A100 (156 and
/// 19.5 TFLOPS) and 7.4 times on H100 and H200 (494 and 67).
const TF32_SHARE: f64 = 1.0 / 7.4;
/// Calls by which the host waits for the device.
const WAITS: [&str; 3] = ["cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize"];

pub(super) fn findings(facts: &Facts<'_>) -> Vec<Finding> {
    let mut found = Vec::new();
    let profiled = facts.profiled();
    found.extend(copies(facts, profiled));
    found.extend(throttling(facts));
    let Some(profiled) = profiled.filter(|_| facts.run.machine.has_gpu()) else { return found };
    found.extend(offload(facts, profiled));
    found.extend(float32_products(facts, profiled));
    found.extend(idle(facts, profiled));
    found
}

/// From the host to the device.
fn copies(facts: &Facts<'_>, profiled: Option<&ProfiledSteps>) -> Option<Finding> {
    let seconds = facts.seconds(Phase::HostToDevice);
    let pageable: Vec<_> =
        profiled.into_iter().flat_map(|it| &it.device_work).filter(|it| it.name.contains("HtoD (Pageable")).collect();
    let finding = facts.finding(Bottleneck::HostToDevice, seconds)?;
    let finding = finding.evidence(format!("copies to the device take {}", facts.of_step(seconds)));
    Some(match pageable.first() {
        Some(copy) => finding
            .op(Some(&copy.name))
            .evidence(format!(
                "{:.1} copies a step are from pageable memory: the host waits for them, and they go through a buffer",
                pageable.iter().map(|it| it.calls).sum::<f64>()
            ))
            .remedy("`.pin_memory(true).to_device(device)` on the loader copies from pinned memory, beside the steps"),
        None => finding.remedy(
            "`.to_device(device)` on the loader copies beside the steps; send bytes and make floats on the device (`ToFloat`)",
        ),
    })
}

fn throttling(facts: &Facts<'_>) -> Option<Finding> {
    let gpus = || facts.samples.iter().flat_map(|sample| &sample.gpus);
    let full = gpus().filter_map(|gpu| gpu.sm_clock_hertz).fold(0.0, f64::max);
    let throttled: Vec<_> = gpus().filter(|gpu| gpu.is_throttled()).collect();
    let clock = super::facts::mean(throttled.iter().filter_map(|gpu| gpu.sm_clock_hertz))?;
    let share_of_time = throttled.len() as f64 / gpus().count() as f64;
    let lost = share_of_time * (1.0 - clock / full);
    let finding = facts.finding(Bottleneck::Throttling, lost * facts.step_seconds)?;
    let mut reasons: Vec<_> =
        throttled.iter().flat_map(|gpu| &gpu.throttle_reasons).map(|reason| reason.name()).collect();
    reasons.sort_unstable();
    reasons.dedup();
    Some(
        finding
            .evidence(format!(
                "for {:.0}% of the time the clock is at {:.0} of {:.0} MHz: {}",
                100.0 * share_of_time,
                clock / 1e6,
                full / 1e6,
                reasons.join(", ")
            ))
            .remedy("better cooling, or a higher power limit (`nvidia-smi --power-limit`); no line of the program"),
    )
}

/// Tensors that leave the device within a step and come back.
fn offload(facts: &Facts<'_>, profiled: &ProfiledSteps) -> Option<Finding> {
    let sum = |name: &str| {
        let copies = profiled.device_work.iter().filter(|it| it.name.contains(name));
        copies.map(|it| it.seconds).sum::<f64>()
    };
    let (out, back) = (sum("Memcpy DtoH"), sum("Memcpy HtoD"));
    let batch = profiled.phase(Phase::HostToDevice).map_or(0.0, |phase| phase.seconds);
    let both = out + (back - batch).max(0.0);
    if out < 0.3 * both {
        return None;
    }
    let finding = facts.finding(Bottleneck::Offload, both)?;
    Some(
        finding
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
    let is_float32 = |work: &&ScopeTimes| {
        let name = work.name.to_lowercase();
        let is_product =
            name.contains("gemm") || name.contains("fprop") || name.contains("dgrad") || name.contains("wgrad");
        let is_single = name.contains("sgemm") || name.contains("f32f32_f32f32") || name.contains("simt");
        is_product && is_single && !name.contains("tf32")
    };
    let kernels: Vec<_> = profiled.device_work.iter().filter(is_float32).collect();
    let longest = kernels.first()?;
    let seconds = kernels.iter().map(|it| it.seconds).sum::<f64>();
    let share = seconds / facts.step_seconds;
    let seconds = seconds * (1.0 - TF32_SHARE);
    let finding = facts.finding(Bottleneck::Float32Matmul, seconds)?;
    let tensor_cores = facts.samples.iter().flat_map(|it| &it.gpus).filter_map(|gpu| gpu.tensor_utilization);
    let mut finding = finding
        .op(Some(&longest.name))
        .evidence(format!("products of float32 take {:.0}% of a step", 100.0 * share))
        .remedy(
            "`autocast(device, Kind::BFloat16, || ..)` around the forward pass; or `set_allow_tf32(true)` where float32 has to \
             stay",
        );
    if let Some(busy) = super::facts::mean(tensor_cores) {
        finding = finding.evidence(format!("tensor cores are at work for {:.0}% of the time", 100.0 * busy));
    }
    Some(finding)
}

/// The device has nothing to do: the host waits for it, or does not hand work out fast enough.
fn idle(facts: &Facts<'_>, profiled: &ProfiledSteps) -> Option<Finding> {
    // The profiler holds the host up, not the device.
    let idle = facts.step_seconds - profiled.device_busy_seconds?;
    let known = [Phase::DataWait, Phase::HostToDevice, Phase::Communication].map(|phase| facts.seconds(phase));
    let seconds = idle - known.iter().sum::<f64>();
    let waits: Vec<_> = profiled.ops.iter().filter(|op| WAITS.contains(&op.name.as_str()) && op.calls >= 0.9).collect();
    let read = profiled.ops.iter().find(|op| op.name == "aten::_local_scalar_dense" && op.calls >= 0.9);
    let evidence = format!("the GPU does nothing for {}", facts.of_step(idle));
    if read.is_none() && waits.is_empty() {
        let finding = facts.finding(Bottleneck::KernelLaunches, seconds)?;
        let operators: f64 = profiled.phases.iter().map(|phase| phase.operators).sum();
        return Some(
            finding
                .evidence(evidence)
                .evidence(format!("the host hands out {operators:.0} operators a step"))
                .remedy("do more in each operator: larger batches, fused optimizers (`.fused(true)`), `channels_last`"),
        );
    }
    let calls = read.map_or_else(|| waits.iter().map(|op| op.calls).sum(), |op| op.calls);
    let finding = facts.finding(Bottleneck::HostSync, seconds)?;
    Some(
        finding
            .op(Some(if read.is_some() { "aten::item" } else { "cudaStreamSynchronize" }))
            .scope(read.or(waits.first().copied()).and_then(|op| op.scope.as_deref()))
            .evidence(evidence)
            .evidence(format!("the host waits for the device {calls:.0} times a step"))
            .remedy(
                "read numbers less often: add losses up on the device (`total += &loss.detach()`), and \
                 `total.double_value(&[])` every 100 steps",
            ),
    )
}
