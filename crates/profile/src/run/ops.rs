//! Sums over the profiled steps, which fit into a small file.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::{MemoryTimeline, Phase};

/// A few steps under the profiler. Times and counts are means per step, on the training thread unless stated otherwise.
/// They include the profiler's overhead, so shares are more reliable than the times themselves.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ProfiledSteps {
    /// How many steps.
    pub steps: u64,
    /// Seconds of a step.
    pub step_seconds: f64,
    /// Seconds of a step in which the training thread was ready to run, but waited for a CPU. None if the kernel does
    /// not report it.
    #[serde(default)]
    pub queued_seconds: Option<f64>,
    /// The phases, in the order of [`Phase::ALL`].
    pub phases: Vec<PhaseTimes>,
    /// Operators by phase, scope and name, of all recorded threads; those with the most self time first.
    pub ops: Vec<OpTimes>,
    /// The user's scopes, of all threads; the longest first.
    pub scopes: Vec<ScopeTimes>,
    /// Where the training thread ran no operator for 0.1 ms or more at a time; the longest first.
    pub gaps: Vec<HostGap>,
    /// Loops that read numbers out of tensors, from the first number to the last; the longest first.
    pub read_backs: Vec<HostGap>,
    /// Kernels and copies of the GPU, the longest first. Those that run at the same time share it, so that all of them
    /// add up to [`device_busy_seconds`](Self::device_busy_seconds).
    pub device_work: Vec<ScopeTimes>,
    /// Seconds in which the GPU was busy; of several GPUs, the busiest. None without a GPU.
    pub device_busy_seconds: Option<f64>,
    /// Bytes of tensors that a step does not free, by device: measured from the end of the first step to that of the
    /// last.
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
    /// How many were called in all; the profiler adds overhead to each.
    pub calls: f64,
    /// How many of these took 10 us or less by themselves.
    pub small_calls: f64,
    /// The seconds of these by themselves.
    pub small_call_seconds: f64,
    /// Seconds without an operator, for less than 0.1 ms at a time, or within long loops over numbers.
    pub short_pause_seconds: f64,
    /// Seconds without an operator while ranks communicated.
    pub communication_seconds: f64,
    /// Seconds of operators that only serve communication: copies into and out of buckets, starts of collectives.
    pub exchange_operator_seconds: f64,
}

/// An operator in one phase and scope.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct OpTimes {
    /// Its name: `aten::addmm`.
    pub name: String,
    /// Its phase.
    pub phase: Phase,
    /// The innermost scope of the user around it.
    pub scope: Option<String>,
    /// How often it is called.
    pub calls: f64,
    /// Seconds on the host, without those of the operators within it.
    pub self_cpu_seconds: f64,
    /// Seconds on the GPU of what it launched itself.
    pub device_seconds: f64,
    /// Floating point operations, if libtorch computes them.
    pub flops: f64,
}

/// A scope, a kernel or a copy.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ScopeTimes {
    /// Its name.
    pub name: String,
    /// How often it occurs.
    pub calls: f64,
    /// Seconds.
    pub seconds: f64,
    /// Whether it was on the training thread.
    pub is_main_thread: bool,
}

/// Time without operators, or a loop that reads numbers out of tensors, in one phase and scope.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct HostGap {
    /// Its phase.
    pub phase: Phase,
    /// The innermost scope of the user around it.
    pub scope: Option<String>,
    /// How many gaps, or how many numbers are read.
    pub calls: f64,
    /// Seconds.
    pub seconds: f64,
    /// For a gap, its seconds in the median step: 0 if fewer than half of the steps have it. None for loops, and in
    /// older records.
    #[serde(default)]
    pub typical_seconds: Option<f64>,
    /// How many operators were called in it, including those within others.
    pub operators: f64,
}

impl HostGap {
    /// Seconds in a typical step, so that pauses in a few steps, in which the thread lost its CPU, do not count.
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
