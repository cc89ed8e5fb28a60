//! What only ever grows, and how fast it does.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// What the kernel has counted since the machine, or the process, was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counters {
    /// Seconds that CPUs were at work, added up.
    pub cpu_seconds: f64,
    /// Bytes read from disks. None where the kernel does not tell.
    pub disk_read_bytes: Option<u64>,
    /// Bytes written to disks. None where the kernel does not tell.
    pub disk_written_bytes: Option<u64>,
    /// Switches from one thread to another.
    pub context_switches: u64,
    /// Pages that were not mapped when they were touched, those read from a disk among them.
    pub page_faults: u64,
    /// Pages that had to be read from a disk.
    pub major_page_faults: u64,
}

/// How fast [`Counters`] grow. Nothing is said about one that ran backwards.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// How many CPUs are at work.
    pub cpus_busy: Option<f64>,
    /// Bytes a second read from disks.
    pub disk_read_bytes_per_second: Option<f64>,
    /// Bytes a second written to disks.
    pub disk_written_bytes_per_second: Option<f64>,
    /// Switches a second from one thread to another.
    pub context_switches_per_second: Option<f64>,
    /// Page faults a second.
    pub page_faults_per_second: Option<f64>,
    /// Page faults a second that had to read from a disk.
    pub major_page_faults_per_second: Option<f64>,
}

impl Counters {
    /// How fast they have grown in a time. None in no time.
    pub fn rates_since(&self, before: &Self, time: Duration) -> Option<Rates> {
        let seconds = time.as_secs_f64();
        if seconds <= 0.0 {
            return None;
        }
        let rate = |now: u64, before: u64| now.checked_sub(before).map(|grown| grown as f64 / seconds);
        let optional = |now: Option<u64>, before: Option<u64>| rate(now?, before?);
        let cpu_seconds = self.cpu_seconds - before.cpu_seconds;
        Some(Rates {
            cpus_busy: (cpu_seconds >= 0.0).then_some(cpu_seconds / seconds),
            disk_read_bytes_per_second: optional(self.disk_read_bytes, before.disk_read_bytes),
            disk_written_bytes_per_second: optional(self.disk_written_bytes, before.disk_written_bytes),
            context_switches_per_second: rate(self.context_switches, before.context_switches),
            page_faults_per_second: rate(self.page_faults, before.page_faults),
            major_page_faults_per_second: rate(self.major_page_faults, before.major_page_faults),
        })
    }
}
