//! What a table is sorted by.

use std::str::FromStr;

use super::averages::mean;
use super::table::Row;
use crate::ProfileError;

/// What a table is sorted by, the largest first.
///
/// `"cuda_time_total".parse()` understands PyTorch's names, in which `cuda`, `xpu` and `privateuse1` stand for
/// `device`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SortBy {
    /// Time on the host per call: `cpu_time`.
    CpuTime,
    /// Time on the host: `cpu_time_total`.
    CpuTimeTotal,
    /// Time on the host without children: `self_cpu_time_total`.
    SelfCpuTimeTotal,
    /// Time on the device per call: `cuda_time`.
    DeviceTime,
    /// Time on the device: `cuda_time_total`.
    DeviceTimeTotal,
    /// Time on the device without children: `self_cuda_time_total`.
    SelfDeviceTimeTotal,
    /// Host memory: `cpu_memory_usage`.
    CpuMemoryUsage,
    /// Host memory without children: `self_cpu_memory_usage`.
    SelfCpuMemoryUsage,
    /// Device memory: `cuda_memory_usage`.
    DeviceMemoryUsage,
    /// Device memory without children: `self_cuda_memory_usage`.
    SelfDeviceMemoryUsage,
    /// Calls: `count`.
    Count,
    /// Floating point operations: `flops`.
    Flops,
    /// The name, in descending order: `key`.
    Key,
}

impl SortBy {
    /// All keys with PyTorch's names.
    pub const ALL: [(&'static str, Self); 13] = [
        ("cpu_time", Self::CpuTime),
        ("cpu_time_total", Self::CpuTimeTotal),
        ("self_cpu_time_total", Self::SelfCpuTimeTotal),
        ("device_time", Self::DeviceTime),
        ("device_time_total", Self::DeviceTimeTotal),
        ("self_device_time_total", Self::SelfDeviceTimeTotal),
        ("cpu_memory_usage", Self::CpuMemoryUsage),
        ("self_cpu_memory_usage", Self::SelfCpuMemoryUsage),
        ("device_memory_usage", Self::DeviceMemoryUsage),
        ("self_device_memory_usage", Self::SelfDeviceMemoryUsage),
        ("count", Self::Count),
        ("flops", Self::Flops),
        ("key", Self::Key),
    ];

    /// Stable: equal rows keep their order.
    pub(super) fn sort(self, rows: &mut [Row<'_>]) {
        if self == Self::Key {
            rows.sort_by(|a, b| b.name.cmp(a.name));
        } else {
            rows.sort_by(|a, b| self.figure(b).total_cmp(&self.figure(a)));
        }
    }

    /// As `f64`; whole numbers up to 2^53 keep their order.
    fn figure(self, row: &Row<'_>) -> f64 {
        let whole = match self {
            Self::CpuTime => return mean(row.cpu_ns, row.count),
            Self::DeviceTime => return mean(row.device_ns, row.count),
            Self::Count => return row.count as f64,
            Self::Flops => return row.flops as f64,
            Self::CpuTimeTotal => row.cpu_ns,
            Self::SelfCpuTimeTotal => row.self_cpu_ns,
            Self::DeviceTimeTotal => row.device_ns,
            Self::SelfDeviceTimeTotal => row.self_device_ns,
            Self::CpuMemoryUsage => row.cpu_memory,
            Self::SelfCpuMemoryUsage => row.self_cpu_memory,
            Self::DeviceMemoryUsage => row.device_memory,
            Self::SelfDeviceMemoryUsage => row.self_device_memory,
            Self::Key => 0,
        };
        whole as f64
    }
}

impl FromStr for SortBy {
    type Err = ProfileError;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        let known = name.replace("cuda", "device").replace("xpu", "device").replace("privateuse1", "device");
        let found = Self::ALL.iter().find(|(name, _)| *name == known);
        found.map(|(_, key)| *key).ok_or_else(|| ProfileError::UnknownSortKey(name.to_owned()))
    }
}
