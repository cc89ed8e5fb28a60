//! The parts of a step.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A part of a training step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Waiting for the next batch.
    DataWait,
    /// Copying the batch to the device.
    HostToDevice,
    /// From the inputs to the loss.
    Forward,
    /// From the loss to the gradients.
    Backward,
    /// From the gradients to the parameters.
    Optimizer,
    /// Waiting for other ranks. Communication that overlaps with the backward pass counts there.
    Communication,
    /// Time without an open phase.
    Other,
}

impl Phase {
    /// All phases, in the order of a step.
    pub const ALL: [Self; 7] = [
        Self::DataWait,
        Self::HostToDevice,
        Self::Forward,
        Self::Backward,
        Self::Optimizer,
        Self::Communication,
        Self::Other,
    ];

    /// Its name, also that of its scope in the profiler's traces.
    pub fn name(self) -> &'static str {
        match self {
            Self::DataWait => "data wait",
            Self::HostToDevice => "host to device",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Optimizer => "optimizer",
            Self::Communication => "communication",
            Self::Other => "other",
        }
    }
}

impl fmt::Display for Phase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One value for each phase.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct ByPhase<T>([T; Phase::ALL.len()]);

impl<T> std::ops::Index<Phase> for ByPhase<T> {
    type Output = T;

    fn index(&self, phase: Phase) -> &T {
        &self.0[phase as usize]
    }
}

impl<T> std::ops::IndexMut<Phase> for ByPhase<T> {
    fn index_mut(&mut self, phase: Phase) -> &mut T {
        &mut self.0[phase as usize]
    }
}
