//! Findings about clocks that heat or power lowers.

use super::facts::{Facts, mean};
use super::finding::{Bottleneck, Finding};
use super::memory::{gpu_indices, of_gpu};
use crate::GpuSample;

/// Each GPU is judged separately; the one that loses most counts, because the others wait for it.
pub(super) fn throttling(facts: &Facts<'_>) -> Option<Finding> {
    let gpus = gpu_indices(facts);
    let mut slowed: Vec<_> = gpus.iter().filter_map(|&gpu| Slowed::of(facts, gpu)).collect();
    slowed.sort_by(|one, other| other.lost.total_cmp(&one.lost));
    let most = slowed.first()?;
    let mut finding = facts.finding(Bottleneck::Throttling, most.lost * facts.step_seconds)?;
    for gpu in &slowed {
        finding = finding.evidence(gpu.evidence());
    }
    Some(finding.remedy(
        "improve cooling, or raise the power limit (`nvidia-smi --power-limit`); the program cannot change this",
    ))
}

/// A GPU whose clock is lowered at times.
struct Slowed {
    index: u32,
    /// The share of the time in which it is throttled.
    share_of_time: f64,
    /// Its mean clock then, in hertz.
    clock: f64,
    /// Its highest clock in the samples.
    full: f64,
    /// The share of its clock that is lost.
    lost: f64,
    reasons: Vec<&'static str>,
}

impl Slowed {
    fn of(facts: &Facts<'_>, index: u32) -> Option<Self> {
        let samples: Vec<&GpuSample> = facts.samples.iter().filter_map(|sample| of_gpu(sample, index)).collect();
        let full = samples.iter().filter_map(|gpu| gpu.sm_clock_hertz).fold(0.0, f64::max);
        let throttled: Vec<_> = samples.iter().filter(|gpu| gpu.is_throttled()).collect();
        let clock = mean(throttled.iter().filter_map(|gpu| gpu.sm_clock_hertz))?;
        let share_of_time = throttled.len() as f64 / samples.len() as f64;
        let lost = share_of_time * (1.0 - clock / full);
        let reasons = throttled.iter().flat_map(|gpu| &gpu.throttle_reasons).filter(|reason| reason.is_slowdown());
        let mut reasons: Vec<_> = reasons.map(|reason| reason.name()).collect();
        reasons.sort_unstable();
        reasons.dedup();
        (lost >= 0.01).then_some(Self { index, share_of_time, clock, full, lost, reasons })
    }

    fn evidence(&self) -> String {
        format!(
            "for {:.0}% of the time the clock of GPU {} is at {:.0} of {:.0} MHz: {}",
            100.0 * self.share_of_time,
            self.index,
            self.clock / 1e6,
            self.full / 1e6,
            self.reasons.join(", ")
        )
    }
}
