//! What is measured of one contender.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Contender, Disturbance};

/// Where it trains.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceKind {
    /// The processor.
    #[default]
    Cpu,
    /// A CUDA device.
    Cuda,
}

impl fmt::Display for DeviceKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Cpu => "cpu",
            Self::Cuda => "cuda",
        })
    }
}

/// A number of steps of steady training. The contenders take turns, so turns of one round saw the same machine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    /// Seconds, the device's queued work included.
    pub seconds: f64,
    /// Seconds of it in which the training thread was getting data, decoding included where it decodes itself.
    pub wait_seconds: f64,
    /// Images or tokens trained on.
    pub samples: u64,
    /// What else used the machine meanwhile; filled in by whoever measures.
    #[serde(default)]
    pub disturbance: Disturbance,
}

impl Turn {
    /// Samples a second.
    pub fn rate(&self) -> f64 {
        self.samples as f64 / self.seconds
    }
}

/// A state of a whole training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Mark {
    /// Seconds of training so far, from before the data is opened; testing is not on this clock.
    pub seconds: f64,
    /// Mean training loss since the mark before; absent where it is not finite, which JSON cannot say.
    pub loss: Option<f64>,
    /// Share of the test images recognised, from 0 to 1, or none where there is no test.
    pub accuracy: Option<f64>,
}

/// A training from the first step to the last.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Whole {
    /// The seed of weights and order.
    pub seed: u32,
    /// Seconds of training; testing is not on this clock.
    pub seconds: f64,
    /// Seconds of it in which the training thread was getting data.
    pub wait_seconds: f64,
    /// The end of each epoch, or of each so many steps.
    pub marks: Vec<Mark>,
    /// What else used the machine meanwhile; filled in by whoever measures.
    #[serde(default)]
    pub disturbance: Disturbance,
}

/// A phase of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// `data wait`, `forward`, ..
    pub phase: String,
    /// When it began, in seconds from the first span.
    pub start: f64,
    /// How long it took.
    pub seconds: f64,
}

/// Everything measured of one contender on one workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// Who.
    pub contender: Contender,
    /// What it chose by measuring at its start: workers, threads, a decoder.
    pub choices: Vec<String>,
    /// One a round.
    pub turns: Vec<Turn>,
    /// One a seed.
    pub wholes: Vec<Whole>,
    /// The most memory that was seen at the end of a turn, shared pages counted once: the process and its workers.
    pub peak_bytes: Option<u64>,
    /// The most memory that was allocated on the device.
    pub peak_device_bytes: Option<u64>,
    /// A few steps, phase by phase; empty where nothing was recorded.
    pub timeline: Vec<Span>,
}
