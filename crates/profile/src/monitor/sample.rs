//! Samples of the machine.

use std::fmt;

use overdrive_core::CacheFill;
use serde::{Deserialize, Serialize};

use super::{Counters, GpuSample, Rates};

/// The machine at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Sample {
    /// Seconds since 1970 by the system's clock, which may be set at any time: only good as a label.
    pub unix_seconds: f64,
    /// Seconds since monitoring began, by the monotonic clock. Rates are based on it.
    pub elapsed_seconds: f64,
    /// The whole machine, even in a container. None in a [gap](super::MonitorGap).
    pub system: Option<SystemSample>,
    /// This process. None in a [gap](super::MonitorGap).
    pub process: Option<ProcessSample>,
    /// The caches of this process that keep samples in memory (`Cached` of `overdrive-dataload`). None without one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub caches: Option<CacheSample>,
    /// Each GPU that answers.
    pub gpus: Vec<GpuSample>,
    /// The threads of this process, if they are sampled: the 64 that used the most CPU time.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub threads: Vec<ThreadSample>,
}

/// How far the caches of this process are filled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct CacheSample {
    /// Samples of datasets that they keep.
    pub kept: u64,
    /// Samples that they will keep in the end.
    pub wanted: u64,
}

impl CacheSample {
    pub(super) fn now() -> Option<Self> {
        let CacheFill { kept, wanted } = CacheFill::of_this_process()?;
        Some(Self { kept, wanted })
    }
}

/// A thread of this process.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ThreadSample {
    /// The system's thread ID.
    pub id: i32,
    /// The first 15 bytes of its name.
    pub name: String,
    /// Seconds that it was on a CPU, since it was started.
    pub cpu_seconds: f64,
    /// Seconds that it was ready to run, but waited for a CPU.
    pub queued_seconds: f64,
}

/// The whole machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct SystemSample {
    /// How many CPUs it has.
    pub cpus: u32,
    /// Threads that run or wait for a CPU or a disk, averaged over a minute.
    pub load1: f64,
    /// The same over 5 minutes.
    pub load5: f64,
    /// The same over 15 minutes.
    pub load15: f64,
    /// Bytes of memory.
    pub memory_total_bytes: u64,
    /// Bytes of memory that are still available to programs.
    pub memory_available_bytes: Option<u64>,
    /// Counters since the machine was started.
    pub counters: Counters,
    /// How fast they grew since the last sample.
    pub rates: Option<Rates>,
}

impl SystemSample {
    /// The share of its CPUs that are busy, from 0 to 1.
    pub fn cpu_utilization(&self) -> Option<f64> {
        let busy = self.rates?.cpus_busy?;
        // Can exceed 1 slightly, because the kernel counts in hundredths of a second.
        (self.cpus > 0).then(|| (busy / f64::from(self.cpus)).min(1.0))
    }
}

/// This process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProcessSample {
    /// Bytes of resident memory.
    pub resident_memory_bytes: u64,
    /// Resident bytes that are not backed by files, so that the system cannot reclaim them. None if the kernel does not
    /// report it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub anonymous_memory_bytes: Option<u64>,
    /// How many threads it has.
    pub threads: u64,
    /// Counters since it was started.
    pub counters: Counters,
    /// How fast they grew since the last sample.
    pub rates: Option<Rates>,
}

impl ProcessSample {
    /// Bytes that it holds: the anonymous ones, if known.
    pub(crate) fn own_memory_bytes(&self) -> u64 {
        self.anonymous_memory_bytes.unwrap_or(self.resident_memory_bytes)
    }
}

impl fmt::Display for Sample {
    /// One readable line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const GB: f64 = 1e9;
        let mut parts = Vec::new();
        if let Some(system) = &self.system {
            parts.push(match system.cpu_utilization() {
                Some(utilization) => format!("CPU {:.0}%", 100.0 * utilization),
                None => format!("{} CPUs", system.cpus),
            });
        }
        if let Some(process) = &self.process {
            parts.push(format!("{:.1} GB resident", process.resident_memory_bytes as f64 / GB));
            if let Some(read) = process.rates.and_then(|rates| rates.disk_read_bytes_per_second) {
                parts.push(format!("{:.0} MB/s read", read / 1e6));
            }
        }
        for gpu in &self.gpus {
            let mut part = format!("GPU {}", gpu.index);
            if let Some(utilization) = gpu.utilization {
                part += &format!(" {:.0}%", 100.0 * utilization);
            }
            if let (Some(used), Some(total)) = (gpu.memory_used_bytes, gpu.memory_total_bytes) {
                part += &format!(" {:.1}/{:.0} GB", used as f64 / GB, total as f64 / GB);
            }
            if let Some(temperature) = gpu.temperature_celsius {
                part += &format!(" {temperature:.0} °C");
            }
            if let Some(power) = gpu.power_watts {
                part += &format!(" {power:.0} W");
            }
            if gpu.is_throttled() {
                part += " throttled";
            }
            parts.push(part);
        }
        f.write_str(&parts.join(", "))
    }
}
