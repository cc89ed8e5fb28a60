//! The parts of a diagnosis.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a run waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
#[serde(rename_all = "snake_case")]
pub enum Bottleneck {
    /// Data: a disk or a network is slow to read from.
    SlowRead,
    /// Data: CPUs do not keep up with decoding and transforms.
    SlowDecode,
    /// Data: there are free CPUs for more workers.
    TooFewWorkers,
    /// Copies from the host to the device.
    HostToDevice,
    /// The host is busy launching operators that are too small.
    KernelLaunches,
    /// Numbers are read out of tensors one by one, in a loop.
    HostLoop,
    /// The host waits for the device: `.item()`, `double_value`, copies to the host.
    HostSync,
    /// The optimizer updates many tensors one by one.
    OptimizerLoop,
    /// The program's own code outside of operators: logs, files.
    HostCode,
    /// Matrix products in float32, which do not use the tensor cores.
    Float32Matmul,
    /// Tensors are copied to the host and back within a step.
    Offload,
    /// Memory grows from step to step.
    MemoryGrowth,
    /// Memory is nearly full, or swapped.
    MemoryCapacity,
    /// Exchanges between ranks.
    Communication,
    /// One rank is slower than the others, which wait for it.
    Straggler,
    /// Heat or power lowers the GPU's clocks.
    Throttling,
    /// Arithmetic: a healthy run.
    Compute,
    /// Reading and writing tensors: a healthy run.
    MemoryBandwidth,
    /// Memory is taken from the driver and given back: `cudaMalloc`, `cudaFree`, pinned memory.
    DriverMemory,
}

impl Bottleneck {
    /// All bottlenecks.
    pub const ALL: [Self; 19] = [
        Self::SlowRead,
        Self::SlowDecode,
        Self::TooFewWorkers,
        Self::HostToDevice,
        Self::KernelLaunches,
        Self::HostLoop,
        Self::HostSync,
        Self::OptimizerLoop,
        Self::HostCode,
        Self::Float32Matmul,
        Self::Offload,
        Self::MemoryGrowth,
        Self::MemoryCapacity,
        Self::Communication,
        Self::Straggler,
        Self::Throttling,
        Self::Compute,
        Self::MemoryBandwidth,
        Self::DriverMemory,
    ];

    /// Its name, as in "bound by ..".
    pub fn name(self) -> &'static str {
        match self {
            Self::SlowRead => "slow reads",
            Self::SlowDecode => "slow decoding",
            Self::TooFewWorkers => "too few workers",
            Self::HostToDevice => "copies to the device",
            Self::KernelLaunches => "launch overhead of tiny operators",
            Self::HostLoop => "a loop over numbers on the host",
            Self::HostSync => "synchronization of the host with the device",
            Self::OptimizerLoop => "an optimizer that updates tensor by tensor",
            Self::HostCode => "the program's own code on the host",
            Self::Float32Matmul => "float32 matrix products without tensor cores",
            Self::Offload => "copies of tensors to the host and back",
            Self::MemoryGrowth => "growing memory",
            Self::MemoryCapacity => "full memory",
            Self::Communication => "communication",
            Self::Straggler => "a slow rank",
            Self::Throttling => "throttled clocks",
            Self::Compute => "arithmetic",
            Self::MemoryBandwidth => "memory bandwidth",
            Self::DriverMemory => "memory from the driver",
        }
    }
}

impl fmt::Display for Bottleneck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Something that can be improved, and the gain at best.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Finding {
    /// Its kind.
    pub bottleneck: Bottleneck,
    /// Seconds of the mean step that can be saved at best.
    pub seconds_per_step: f64,
    /// The same as a share of the step, from 0 to 1.
    pub share: f64,
    /// Bytes that each step leaks, if memory grows; else 0.
    #[serde(default)]
    pub bytes_per_step: f64,
    /// The caller's scope in which it was found.
    pub scope: Option<String>,
    /// The operator that causes it.
    pub op: Option<String>,
    /// The figures that it is based on, one per line.
    pub evidence: Vec<String>,
    /// What to do, with the line to change, in terms of these crates.
    pub remedy: String,
}

impl Finding {
    /// How many times faster the run can become at best; 1 if it only ends the run early, or if its cost is unknown.
    ///
    /// # Source
    /// Amdahl 1967: `1 / (1 - share)`
    pub fn speedup_bound(&self) -> f64 {
        1.0 / (1.0 - self.share.clamp(0.0, 0.999))
    }
}

/// What bounds a run, with evidence and remedies. Made by [`Diagnosis::of`].
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Diagnosis {
    /// What bounds the run: the first finding's bottleneck; without findings, arithmetic or memory bandwidth. None if
    /// the record is not enough to tell.
    pub bound_by: Option<Bottleneck>,
    /// The findings: first those that will end the run, then by gain, the greatest first.
    pub findings: Vec<Finding>,
    /// What could not be judged, and why.
    pub unknown: Vec<String>,
}
