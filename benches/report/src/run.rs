//! What one training run measured.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::Technique;

/// Where a run trained.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceKind {
    /// The processor.
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

/// The state of a run at the end of one epoch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct EpochMark {
    /// Seconds of training so far; testing is not on this clock.
    pub seconds: f64,
    /// Share of the test images that were recognised, 0 to 1.
    pub accuracy: f64,
    /// Mean training loss of the epoch; absent where it was not finite, which JSON cannot say.
    pub loss: Option<f64>,
}

/// One technique trained once.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Run {
    /// How it trained.
    pub technique: Technique,
    /// Where it trained.
    pub device: DeviceKind,
    /// Which interleaved repetition it belongs to; runs of one repetition are compared with each other.
    pub repetition: u32,
    /// Seconds of training, first batch to last; testing is not on this clock.
    pub seconds: f64,
    /// Seconds of it that the training thread spent getting data (decoding included, where it decodes itself).
    pub data_wait_seconds: f64,
    /// The end of each epoch, in order.
    pub epochs: Vec<EpochMark>,
    /// The last batch's training loss.
    pub final_loss: f64,
    /// The most memory that the process held, where the system tells.
    pub peak_rss_bytes: Option<u64>,
    /// The most memory that was allocated on the device.
    pub peak_device_bytes: Option<u64>,
}
