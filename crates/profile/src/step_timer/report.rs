//! The report about the steps of a window.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::Phase;
use super::statistics::quantile;
use super::timeline::{Step, Timeline};

/// Where the time of the steps in a window went. Made by [`StepTimer::report`](super::StepTimer::report).
///
/// The reports of all ranks together show [stragglers](super::stragglers()).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct StepReport {
    /// How many steps the figures are from.
    pub steps: u64,
    /// How many steps there were in all, including the warm-up and those that no longer fit into the window.
    pub steps_seen: u64,
    /// Seconds of the `steps` on the host.
    pub total_seconds: f64,
    /// Seconds of the median step on the host.
    pub median_seconds: f64,
    /// The 95th percentile of the steps' seconds.
    pub p95_seconds: f64,
    /// Each phase on the host, where work for a CUDA device is only launched.
    pub phases: Vec<PhaseReport>,
    /// The same on the device. None without a CUDA device, or before the device has finished a step.
    pub device: Option<DeviceReport>,
    /// Samples per second.
    pub samples_per_second: f64,
    /// Tokens per second, if they were counted.
    pub tokens_per_second: Option<f64>,
    /// Model FLOPs utilisation, from 0 to 1: the share of the device's peak that the model's own operations use. None
    /// unless the timer knows both.
    #[doc(alias = "MFU")]
    pub mfu: Option<f64>,
    /// How often the clock ran backwards; that time counts as 0.
    pub clock_jumps: u64,
    /// Why device times ended, if they did.
    pub device_fault: Option<String>,
}

/// A phase in the steps of a window.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PhaseReport {
    /// The phase.
    pub phase: Phase,
    /// Seconds in all steps.
    pub total_seconds: f64,
    /// Seconds in the median step.
    pub median_seconds: f64,
    /// The 95th percentile of its seconds in a step.
    pub p95_seconds: f64,
    /// Its share of all steps' time, from 0 to 1.
    pub share: f64,
}

/// The steps on the device.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct DeviceReport {
    /// How many steps of the window have device times.
    pub steps: u64,
    /// Each phase: the time from the end of the work launched before it to the end of the work launched in it. This
    /// includes the time in which the device is idle.
    pub phases: Vec<PhaseReport>,
    /// Steps, in all, without device times: because the device was too far behind, an event failed, or a step had too
    /// many phases.
    pub lost_steps: u64,
}

impl StepReport {
    pub(super) fn of(timeline: &Timeline, peak_steps_per_second: Option<f64>) -> Option<Self> {
        let steps: Vec<&Step> = timeline.steps().iter().filter(|step| !step.is_profiled).collect();
        if steps.is_empty() {
            return None;
        }
        let total_seconds: f64 = steps.iter().map(|step| step.host_seconds()).sum();
        // If the clock stood still, rates are 0.
        let rate = |count: f64| if total_seconds > 0.0 { count / total_seconds } else { 0.0 };
        let whole = sorted(steps.iter().map(|step| step.host_seconds()));
        let tokens: f64 = steps.iter().map(|step| step.tokens as f64).sum();
        Some(Self {
            steps: steps.len() as u64,
            steps_seen: timeline.steps_seen,
            total_seconds,
            median_seconds: quantile(&whole, 0.5),
            p95_seconds: quantile(&whole, 0.95),
            phases: phases(|phase| steps.iter().map(|step| step.host[phase].as_secs_f64()).collect()),
            device: timeline.device.as_ref().and_then(|device| {
                let done: Vec<_> = steps.iter().filter_map(|step| step.device).collect();
                (!done.is_empty()).then(|| DeviceReport {
                    steps: done.len() as u64,
                    phases: phases(|phase| done.iter().map(|times| times[phase] / 1e3).collect()),
                    lost_steps: device.lost_steps,
                })
            }),
            samples_per_second: rate(steps.iter().map(|step| step.samples as f64).sum()),
            tokens_per_second: (tokens > 0.0).then(|| rate(tokens)),
            mfu: peak_steps_per_second.map(|peak| rate(steps.len() as f64) / peak),
            clock_jumps: timeline.clock_jumps,
            device_fault: timeline.device.as_ref().and_then(|device| device.fault.as_ref().map(ToString::to_string)),
        })
    }

    /// One phase on the host.
    pub fn phase(&self, phase: Phase) -> Option<&PhaseReport> {
        self.phases.iter().find(|report| report.phase == phase)
    }
}

impl DeviceReport {
    /// One phase on the device.
    pub fn phase(&self, phase: Phase) -> Option<&PhaseReport> {
        self.phases.iter().find(|report| report.phase == phase)
    }
}

fn sorted(times: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut times: Vec<f64> = times.collect();
    times.sort_by(f64::total_cmp);
    times
}

fn phases(seconds: impl Fn(Phase) -> Vec<f64>) -> Vec<PhaseReport> {
    let times = Phase::ALL.map(|phase| sorted(seconds(phase).into_iter()));
    let whole: f64 = times.iter().flatten().sum();
    let report = |(phase, times): (Phase, &Vec<f64>)| {
        let total_seconds = times.iter().sum();
        PhaseReport {
            phase,
            total_seconds,
            median_seconds: quantile(times, 0.5),
            p95_seconds: quantile(times, 0.95),
            share: if whole > 0.0 { total_seconds / whole } else { 0.0 },
        }
    };
    Phase::ALL.into_iter().zip(&times).map(report).collect()
}

impl fmt::Display for StepReport {
    /// A table of the phases in milliseconds, followed by the rates.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        table(f, "phase", &self.phases)?;
        if let Some(device) = &self.device {
            table(f, "on the device", &device.phases)?;
        }
        write!(f, "{} steps, median {:.3} ms", self.steps, 1e3 * self.median_seconds)?;
        write!(f, ", {:.1} samples/s", self.samples_per_second)?;
        if let Some(tokens) = self.tokens_per_second {
            write!(f, ", {tokens:.0} tokens/s")?;
        }
        if let Some(mfu) = self.mfu {
            write!(f, ", MFU {:.1}%", 100.0 * mfu)?;
        }
        if let Some(fault) = &self.device_fault {
            write!(f, "\ndevice times ended with an error: {fault}")?;
        }
        Ok(())
    }
}

fn table(f: &mut fmt::Formatter<'_>, title: &str, phases: &[PhaseReport]) -> fmt::Result {
    writeln!(f, "{title:<16}{:>12}{:>12}{:>9}", "median ms", "p95 ms", "share")?;
    for report in phases {
        let (median, p95) = (1e3 * report.median_seconds, 1e3 * report.p95_seconds);
        writeln!(f, "{:<16}{median:>12.3}{p95:>12.3}{:>8.1}%", report.phase, 100.0 * report.share)?;
    }
    Ok(())
}
