//! Counters that only grow, and their rates.

use std::time::Duration;

use serde::{Deserialize, Serialize};

/// The kernel's counters since the machine, or the process, was started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Counters {
    /// Seconds that CPUs were busy, summed over CPUs.
    pub cpu_seconds: f64,
    /// Bytes read from disks. None if the kernel does not report it.
    pub disk_read_bytes: Option<u64>,
    /// Bytes written to disks. None if the kernel does not report it.
    pub disk_written_bytes: Option<u64>,
    /// Switches from one thread to another.
    pub context_switches: u64,
    /// Page faults, major ones included.
    pub page_faults: u64,
    /// Page faults that read from a disk.
    pub major_page_faults: u64,
}

/// How fast [`Counters`] grow. The rate of a counter that ran backwards is None.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Rates {
    /// How many CPUs are busy.
    pub cpus_busy: Option<f64>,
    /// Bytes per second read from disks.
    pub disk_read_bytes_per_second: Option<f64>,
    /// Bytes per second written to disks.
    pub disk_written_bytes_per_second: Option<f64>,
    /// Switches per second from one thread to another.
    pub context_switches_per_second: Option<f64>,
    /// Page faults per second.
    pub page_faults_per_second: Option<f64>,
    /// Page faults per second that read from a disk.
    pub major_page_faults_per_second: Option<f64>,
}

impl Counters {
    /// Their growth since `before`, divided by the time in between. None if that time is 0.
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
