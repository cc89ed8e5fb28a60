//! Findings about a GPU: what it waits for, and what it could do faster.

use super::arithmetic::is_arithmetic;
use super::facts::{Facts, mean};
use super::finding::{Bottleneck, Finding};
use super::host::most_called;
use super::kernels::{self, copies_from_pageable, copies_to_device, copies_to_host, is_float32_product};
use super::memory::{gpu_indices, of_gpu};
use super::places::main_part;
use super::throttling::throttling;
use crate::{OpTimes, Phase, ProfiledSteps, ScopeTimes};

/// The share of their time that float32 products take on tensor cores: NVIDIA states 8 times the float32 rate for TF32
/// on A100 (156 and 19.5 TFLOPS), and 7.4 times on H100 and H200 (494 and 67).
const TF32_SHARE: f64 = 1.0 / 7.4;
/// Phases in which the host and the device may wait: each has its own rule.
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

/// Copies from the host to the device: the phase, if it is marked, else the copies from pageable memory, because the
/// host waits for these.
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
            "copy in the background, by `.to_device(device)` on the loader; send bytes, and convert them to floats on \
             the device (`ToFloat`)",
        )
    } else {
        finding
            .evidence(format!(
                "{:.1} copies per step are from pageable memory: the host waits for them, and they go through a buffer",
                pageable.iter().map(|it| it.calls).sum::<f64>()
            ))
            .remedy("copy from pinned memory in the background, by `.pin_memory(true).to_device(device)` on the loader")
    })
}

/// The scope of copies between host and device outside of the phases for these.
fn scope_of_copies<'a>(facts: &Facts<'a>) -> Option<&'a str> {
    let is_copy = |op: &OpTimes| op.name == "aten::copy_" && !WAITING.contains(&op.phase);
    facts.scope_of_ops(|op| if is_copy(op) { op.device_seconds } else { 0.0 })
}

/// Tensors that are copied to the host and back within a step.
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
                "keep on the device what fits: smaller batches with `Accumulator`, autocast, 8-bit optimizer state; \
                 copy the rest through pinned memory, in parallel with the computation",
            ),
    )
}

/// Matrix products and convolutions in float32 by kernels that do not use tensor cores.
fn float32_products(facts: &Facts<'_>, profiled: &ProfiledSteps) -> Option<Finding> {
    let kernels: Vec<_> = profiled.device_work.iter().filter(|it| is_float32_product(&it.name)).collect();
    let longest = kernels.first()?;
    let seconds = kernels.iter().map(|it| it.seconds).sum::<f64>();
    let share = seconds / facts.step_seconds;
    let remedy = tensor_core_remedy(facts.run.machine.gpu_capability)?;
    let seconds = seconds * (1.0 - TF32_SHARE);
    let finding = facts.finding(Bottleneck::Float32Matmul, seconds)?;
    let mut finding = finding
        .op(Some(&longest.name))
        .scope(facts.scope_of_ops(|op| if is_arithmetic(&op.name) { op.device_seconds } else { 0.0 }))
        .evidence(format!("matrix products in float32 take {:.0}% of a step", 100.0 * share))
        .remedy(remedy);
    for gpu in gpu_indices(facts) {
        let samples = facts.samples.iter().filter_map(|sample| of_gpu(sample, gpu)?.tensor_utilization);
        if let Some(busy) = mean(samples) {
            let figure = format!("the tensor cores of GPU {gpu} are busy for {:.0}% of the time", 100.0 * busy);
            finding = finding.evidence(figure);
        }
    }
    Some(finding)
}

/// What this GPU multiplies faster than float32: nothing before compute capability 7.0, float16 from there, bfloat16 and
/// TF32 from 8.0. The capability is not known where the program was built without CUDA's headers.
fn tensor_core_remedy(capability: Option<(i32, i32)>) -> Option<&'static str> {
    match capability {
        Some((..7, _)) => None,
        Some((7, _)) => Some(
            "put `autocast(device, Kind::Half, || ..)` around the forward pass, and scale the loss by a `GradScaler`; \
             this GPU has no bfloat16 or TF32",
        ),
        None => Some(
            "the GPU's compute capability is not known. From 8.0: put `autocast(device, Kind::BFloat16, || ..)` around \
             the forward pass, or call `set_matmul_allow_tf32(true)`. With 7.x, which has neither: \
             `autocast(device, Kind::Half, || ..)`, and scale the loss by a `GradScaler`",
        ),
        Some(_) => Some(
            "put `autocast(device, Kind::BFloat16, || ..)` around the forward pass; or, to stay with float32, call \
             `set_matmul_allow_tf32(true)`",
        ),
    }
}

/// The device is idle: because the host waits for it, or because the host does not launch work fast enough.
///
/// Without its waits, the host would run ahead by as much as it waits now, so waits cost at most that. The device stays
/// idle for the rest, until less has to be launched.
fn idle(facts: &Facts<'_>, profiled: &ProfiledSteps) -> Vec<Finding> {
    // The profiler slows down the host, not the device, so the device's time needs no correction.
    let Some(busy) = profiled.device_busy_seconds else { return Vec::new() };
    let idle = facts.step_seconds - busy;
    let seconds = idle - WAITING.map(|phase| facts.seconds(phase)).iter().sum::<f64>();
    let evidence = format!("the GPU is idle for {}", facts.of_step(idle));
    let waits = Waits::of(profiled);
    let waited = waits.as_ref().map_or(0.0, |waits| waits.seconds(facts)).clamp(0.0, seconds.max(0.0));
    let of_waits = waits.and_then(|waits| waits.finding(facts, waited, evidence.clone()));
    let mut found: Vec<Finding> = of_waits.into_iter().collect();
    let mut left = seconds - waited;
    for detour in &DETOURS {
        let (seconds, finding) = detour.judge(facts, profiled, left, &evidence);
        left -= seconds;
        found.extend(finding);
    }
    found.extend(launches(facts, profiled, left, evidence));
    found
}

/// Calls of CUDA by which the host does something else than to launch work.
struct Detour {
    bottleneck: Bottleneck,
    is_such: fn(&str) -> bool,
    /// What is counted in the evidence.
    what: &'static str,
    remedy: &'static str,
}

const DETOURS: [Detour; 3] = [
    Detour {
        bottleneck: Bottleneck::HostSync,
        is_such: kernels::polls,
        what: "asks whether the device is done",
        remedy: "do not ask in a loop, which waits as well: ask once a step, and read results a step later, or every 100 \
                 steps",
    },
    Detour {
        bottleneck: Bottleneck::DriverMemory,
        is_such: kernels::is_device_memory,
        what: "takes device memory from the driver or gives it back, for which it may wait for the device,",
        remedy: "libtorch keeps memory, so that no step needs the driver: do not call `empty_cache` in a step; give \
                 batches the same sizes (`.drop_last(true)`, lengths in few buckets), or set \
                 `PYTORCH_ALLOC_CONF=expandable_segments:True`; where memory is full, use smaller batches with \
                 `Accumulator`",
    },
    Detour {
        bottleneck: Bottleneck::DriverMemory,
        is_such: kernels::is_pinned_memory,
        what: "takes pinned memory from the driver or gives it back",
        remedy: "pin memory once, before the steps, and use it again; the loader does that: \
                 `.pin_memory(true).to_device(device)`",
    },
];

impl Detour {
    /// Seconds of a step, at most `left`, and what follows from them.
    fn judge(&self, facts: &Facts<'_>, profiled: &ProfiledSteps, left: f64, evidence: &str) -> (f64, Option<Finding>) {
        let is_such = |op: &&OpTimes| (self.is_such)(&op.name) && !WAITING.contains(&op.phase);
        let calls: Vec<_> = profiled.ops.iter().filter(is_such).collect();
        let seconds = calls.iter().map(|op| facts.unprofiled(op.phase, op.self_cpu_seconds, op.calls)).sum::<f64>();
        let seconds = seconds.clamp(0.0, left.max(0.0));
        let times: f64 = calls.iter().map(|op| op.calls).sum();
        let digits = usize::from(times < 1.0);
        let finding = facts.finding(self.bottleneck, seconds).map(|finding| {
            let longest = calls.iter().max_by(|one, other| one.self_cpu_seconds.total_cmp(&other.self_cpu_seconds));
            let scope = main_part(calls.iter().map(|op| (op.scope.as_deref(), op.self_cpu_seconds))).flatten();
            let finding = finding.op(longest.map(|op| op.name.as_str())).scope(scope).evidence(evidence.to_owned());
            finding.evidence(format!("the host {} {times:.digits$} times per step", self.what)).remedy(self.remedy)
        });
        (seconds, finding)
    }
}

/// Waits of the host for the device in each step.
struct Waits<'a> {
    /// The CUDA calls that wait, copies of pageable memory among them; if no CUDA calls were recorded, the operators that
    /// read numbers.
    places: Vec<&'a OpTimes>,
    calls: f64,
    /// Whether at least half of the waits read numbers out of tensors.
    reads: bool,
}

impl<'a> Waits<'a> {
    fn of(profiled: &'a ProfiledSteps) -> Option<Self> {
        let own = || profiled.ops.iter().filter(|op| !WAITING.contains(&op.phase));
        let is_read = |op: &&OpTimes| op.name == "aten::_local_scalar_dense";
        // Reading a number of a tensor on the host does not wait, so CUDA calls are preferred as evidence.
        let sees_calls = profiled.ops.iter().any(|op| kernels::is_call(&op.name));
        let is_pageable = profiled.device_work.iter().any(|it| kernels::copies_pageable(&it.name));
        let copies = |op: &OpTimes| is_pageable && kernels::waits_for_copy(&op.name, op.self_cpu_seconds / op.calls);
        let waits = |op: &OpTimes| kernels::waits(&op.name) || copies(op);
        let places: Vec<_> = own().filter(|op| if sees_calls { waits(op) } else { is_read(op) }).collect();
        // libtorch waits once more when such a copy has waited: both are one wait.
        let count = |is_copy: bool| places.iter().filter(|op| copies(op) == is_copy).map(|op| op.calls).sum::<f64>();
        let calls = count(true).max(count(false));
        let is_there = |read: &OpTimes| places.iter().any(|op| op.phase == read.phase && op.scope == read.scope);
        let reads =
            own().filter(is_read).filter(|read| is_there(read)).map(|read| read.calls).sum::<f64>() >= 0.5 * calls;
        (calls >= 0.9).then_some(Self { places, calls, reads })
    }

    /// Seconds of a step without the profiler in which the host waits. The profiler slows the host down, so that there
    /// is less to wait for: what it adds to each call is known from phases without waits.
    fn seconds(&self, facts: &Facts<'_>) -> f64 {
        let has_waits = |phase: Phase| self.places.iter().any(|op| op.phase == phase);
        let own = || Phase::ALL.into_iter().filter(|phase| !WAITING.contains(phase));
        let overhead = own().filter(|phase| !has_waits(*phase)).map(|phase| facts.overhead_per_call(phase));
        let overhead = overhead.fold(0.0, f64::max);
        let calls = |phase| facts.profiled().and_then(|it| it.phase(phase)).map_or(0.0, |times| times.calls);
        let hidden = own().filter(|phase| has_waits(*phase));
        let hidden: f64 = hidden.map(|phase| (overhead - facts.overhead_per_call(phase)).max(0.0) * calls(phase)).sum();
        self.places.iter().map(|op| op.self_cpu_seconds).sum::<f64>() + hidden
    }

    fn finding(&self, facts: &Facts<'_>, seconds: f64, evidence: String) -> Option<Finding> {
        let by = |weight: fn(&OpTimes) -> f64| {
            main_part(self.places.iter().map(|op| (op.scope.as_deref(), weight(op)))).flatten()
        };
        let scope = by(|op| op.self_cpu_seconds).or_else(|| by(|op| op.calls));
        let longest = self.places.iter().max_by(|one, other| one.self_cpu_seconds.total_cmp(&other.self_cpu_seconds));
        let finding = facts.finding(Bottleneck::HostSync, seconds)?;
        let finding = finding.op(if self.reads { Some("aten::item") } else { longest.map(|op| op.name.as_str()) });
        let figure = format!("the host waits for the device {:.0} times per step", self.calls);
        Some(finding.scope(scope).evidence(evidence).evidence(figure).remedy(if self.reads {
            "read numbers less often: sum losses on the device (`total += &loss.detach()`), and call \
             `total.double_value(&[])` every 100 steps"
        } else {
            "wait less often: copy to the host every 100 steps, or to pinned memory without waiting, and from pinned \
             memory alone; avoid shapes that depend on values (`nonzero`, masks as indices), which wait as well, and \
             `tch::Cuda::synchronize` in a step"
        }))
    }
}

/// The host does not wait for the device, so it is too slow at launching work.
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
        .evidence(format!("the host launches {operators:.0} operators per step"))
        .remedy(
            "do more in each operator: larger batches, fused optimizers (`.fused(true)`), `channels_last`; or compile the \
             step, which fuses operators: `compile::step` of overdrive-compile",
        );
    if let Some((name, calls)) = call {
        finding = finding.evidence(format!("{calls:.0} calls of {name} per step"));
    }
    Some(finding)
}
