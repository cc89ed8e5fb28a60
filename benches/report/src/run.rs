//! The measurements of one contender.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Contender, Disturbance};

/// The device that trains.
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

/// A few seconds of steady training. Turns of one round are taken one after the other, so they are comparable.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Turn {
    /// Seconds, including the device's queued work.
    pub seconds: f64,
    /// Seconds of it that the training thread spent in getting data. If that thread decodes, this includes decoding.
    pub wait_seconds: f64,
    /// Images or tokens trained on.
    pub samples: u64,
    /// What else used the machine. The contender leaves it out; the benchmark fills it in.
    #[serde(default)]
    pub disturbance: Disturbance,
}

impl Turn {
    /// Samples per second.
    pub fn rate(&self) -> f64 {
        self.samples as f64 / self.seconds
    }
}

/// The state of a whole training at the end of an epoch or of some steps.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Mark {
    /// Seconds of training so far, including opening the data, excluding testing.
    pub seconds: f64,
    /// Mean training loss since the previous mark; absent if it is not finite, which JSON cannot express.
    pub loss: Option<f64>,
    /// Share of the test images classified correctly, from 0 to 1; absent without a test set.
    pub accuracy: Option<f64>,
}

/// A training from start to end.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Whole {
    /// The seed of weights and order.
    pub seed: u32,
    /// Seconds of training, excluding testing.
    pub seconds: f64,
    /// Seconds of it that the training thread spent in getting data.
    pub wait_seconds: f64,
    /// One per epoch; for text, one per twentieth of the steps.
    pub marks: Vec<Mark>,
    /// What else used the machine. The contender leaves it out; the benchmark fills it in.
    #[serde(default)]
    pub disturbance: Disturbance,
}

/// A phase of a step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// `data wait`, `forward`, ..
    pub phase: String,
    /// Its start, in seconds after the first span's.
    pub start: f64,
    /// Its length.
    pub seconds: f64,
}

/// Everything measured of one contender on one workload.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Measured {
    /// The contender.
    pub contender: Contender,
    /// The options that it chose by measuring at its start: workers, threads, the decoder.
    pub choices: Vec<String>,
    /// One per round.
    pub turns: Vec<Turn>,
    /// One per seed.
    pub wholes: Vec<Whole>,
    /// The most memory that the process and its workers held in a turn; shared pages count once. In records from before
    /// 24 November 2026, what they held at the end of a turn.
    pub peak_bytes: Option<u64>,
    /// The largest memory allocated on the device.
    pub peak_device_bytes: Option<u64>,
    /// The phases of a few steps; empty if none were recorded.
    pub timeline: Vec<Span>,
    /// Why it could not go on, if it failed after a turn.
    #[serde(default)]
    pub failure: Option<String>,
}
