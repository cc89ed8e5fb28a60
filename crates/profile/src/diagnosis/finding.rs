//! What a diagnosis is made of.

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
    /// Data: CPUs would be free for more workers.
    TooFewWorkers,
    /// Copies from the host to the device.
    HostToDevice,
    /// The host is busy handing out operators that are too small.
    KernelLaunches,
    /// Numbers are read out of tensors one by one, in a loop.
    HostLoop,
    /// The host waits for the device: `.item()`, `double_value`, copies to the host.
    HostSync,
    /// The optimizer goes through many tensors one by one.
    OptimizerLoop,
    /// Code of the program's own: logs, files.
    HostCode,
    /// Products of float32 matrices while tensor cores sit idle.
    Float32Matmul,
    /// Tensors go to the host and back within a step.
    Offload,
    /// Memory grows from step to step.
    MemoryGrowth,
    /// Memory is nearly full, or swapped.
    MemoryCapacity,
    /// Exchanges between ranks.
    Communication,
    /// One rank is slower than the others, which wait for it.
    Straggler,
    /// Heat or power holds the GPU's clocks down.
    Throttling,
    /// Arithmetic: a healthy run.
    Compute,
    /// Reading and writing of tensors: a healthy run.
    MemoryBandwidth,
}

impl Bottleneck {
    /// All of them.
    pub const ALL: [Self; 18] = [
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
    ];

    /// In words: "bound by ..".
    pub fn name(self) -> &'static str {
        match self {
            Self::SlowRead => "slow reads",
            Self::SlowDecode => "slow decoding",
            Self::TooFewWorkers => "too few workers",
            Self::HostToDevice => "copies to the device",
            Self::KernelLaunches => "launches of tiny operators",
            Self::HostLoop => "a loop over numbers on the host",
            Self::HostSync => "waits of the host for the device",
            Self::OptimizerLoop => "an optimizer that goes tensor by tensor",
            Self::HostCode => "the program's own code on the host",
            Self::Float32Matmul => "float32 products beside idle tensor cores",
            Self::Offload => "tensors that go to the host and back",
            Self::MemoryGrowth => "growing memory",
            Self::MemoryCapacity => "full memory",
            Self::Communication => "communication",
            Self::Straggler => "a slow rank",
            Self::Throttling => "throttled clocks",
            Self::Compute => "arithmetic",
            Self::MemoryBandwidth => "memory bandwidth",
        }
    }
}

impl fmt::Display for Bottleneck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Something that can be removed, and what that can gain.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Finding {
    /// What it is.
    pub bottleneck: Bottleneck,
    /// Seconds of the mean step that go away at best.
    pub seconds_per_step: f64,
    /// The same as a share of the step, from 0 to 1.
    pub share: f64,
    /// Bytes that each step leaves behind, where memory grows; 0 elsewhere.
    #[serde(default)]
    pub bytes_per_step: f64,
    /// The scope of the caller's own in which it was found.
    pub scope: Option<String>,
    /// The operator that it is about.
    pub op: Option<String>,
    /// The figures that it was concluded from, one a line.
    pub evidence: Vec<String>,
    /// What to do, in the terms of these crates; with the line to change.
    pub remedy: String,
}

impl Finding {
    /// How many times faster the run can become at best: 1 for what only ends it early.
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
    /// What the run is bound by: the first finding's, or arithmetic or memory bandwidth where nothing is to be found. None
    /// where the record says too little.
    pub bound_by: Option<Bottleneck>,
    /// What can be removed, the greatest gain first; behind what would end the run.
    pub findings: Vec<Finding>,
    /// What could not be judged, and why.
    pub unknown: Vec<String>,
}
