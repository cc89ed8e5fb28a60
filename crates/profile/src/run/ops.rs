//! What the profiler saw, summed up so that it fits into a small file.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{MemoryTimeline, Phase};

/// A few steps under the profiler. Times and counts are those of the mean step, on the thread that trains unless said
/// otherwise; the profiler's own work is in them, so that shares of them say more than the times themselves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProfiledSteps {
    /// How many steps.
    pub steps: u64,
    /// Seconds of a step.
    pub step_seconds: f64,
    /// Seconds of a step in which the thread that trains was ready to run and no CPU was free. None where the kernel does not tell.
    #[serde(default)]
    pub queued_seconds: Option<f64>,
    /// The phases, in the order of [`Phase::ALL`].
    pub phases: Vec<PhaseTimes>,
    /// Operators by phase, scope and name, of all threads that were seen; what takes the most time by itself first.
    pub ops: Vec<OpTimes>,
    /// Scopes of the user's own, of all threads; the longest first.
    pub scopes: Vec<ScopeTimes>,
    /// Where the thread that trains ran no operator for 0.1 ms and more at a time; the longest first.
    pub gaps: Vec<HostGap>,
    /// Loops that read numbers out of tensors, from the first to the last.
    pub read_backs: Vec<HostGap>,
    /// Kernels and copies of the GPU, the longest first.
    pub device_work: Vec<ScopeTimes>,
    /// Seconds in which the GPU did anything. None without one.
    pub device_busy_seconds: Option<f64>,
    /// Bytes of tensors that a step leaves behind, by device: from the end of the first step to that of the last.
    #[serde(default)]
    pub kept_bytes: BTreeMap<String, f64>,
    /// Memory over all of these steps.
    pub memory: Vec<MemoryTimeline>,
}

/// A phase.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PhaseTimes {
    /// The phase.
    pub phase: Phase,
    /// Seconds.
    pub seconds: f64,
    /// Seconds in which an operator ran.
    pub operator_seconds: f64,
    /// How many operators were called, not counting those within others.
    pub operators: f64,
    /// How many were called in all; each makes the step longer by what the profiler takes for it.
    pub calls: f64,
    /// How many of these took 10 us or less by themselves.
    pub small_calls: f64,
    /// Seconds of those.
    pub small_call_seconds: f64,
    /// Seconds without an operator, for less than 0.1 ms at a time.
    pub short_pause_seconds: f64,
    /// Seconds without an operator while ranks exchanged something.
    pub communication_seconds: f64,
    /// Seconds of operators that only serve exchanges: copies into and out of buckets, starts of collectives.
    pub exchange_operator_seconds: f64,
}

/// An operator in some place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OpTimes {
    /// Its name: `aten::addmm`.
    pub name: String,
    /// In which phase.
    pub phase: Phase,
    /// The innermost scope of the user's own around it.
    pub scope: Option<String>,
    /// How often.
    pub calls: f64,
    /// Seconds on the host, without those of the operators within it.
    pub self_cpu_seconds: f64,
    /// Seconds on the GPU of what it launched itself.
    pub device_seconds: f64,
    /// Floating point operations, where libtorch can tell.
    pub flops: f64,
}

/// A scope, a kernel or a copy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ScopeTimes {
    /// Its name.
    pub name: String,
    /// How often.
    pub calls: f64,
    /// Seconds.
    pub seconds: f64,
    /// Whether it was on the thread that trains.
    pub is_main_thread: bool,
}

/// Time that is no operator's.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HostGap {
    /// In which phase.
    pub phase: Phase,
    /// The innermost scope of the user's own around it.
    pub scope: Option<String>,
    /// How often.
    pub calls: f64,
    /// Seconds.
    pub seconds: f64,
    /// Of a gap, seconds of the median step: nothing where it was in less than half of the steps. None of loops, and in records of
    /// before this was kept.
    #[serde(default)]
    pub typical_seconds: Option<f64>,
    /// How many operators were called in it in all.
    pub operators: f64,
}

impl HostGap {
    /// Seconds of a typical step: a machine that takes the CPU away does so now and then.
    pub(crate) fn typical(&self) -> f64 {
        self.typical_seconds.map_or(self.seconds, |typical| typical.min(self.seconds))
    }
}

impl ProfiledSteps {
    /// One phase.
    pub fn phase(&self, phase: Phase) -> Option<&PhaseTimes> {
        self.phases.iter().find(|times| times.phase == phase)
    }
}
