//! Gaps: what could not be sampled, and when.

use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// How many of the last gaps are kept.
const MOST_GAPS: usize = 256;

/// A time span in which something could not be sampled, or not reliably.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct MonitorGap {
    /// What is missing.
    pub source: GapSource,
    /// When it began, in seconds since monitoring began.
    pub from_seconds: f64,
    /// When it ended. None while it lasts.
    pub to_seconds: Option<f64>,
    /// The reason.
    pub reason: String,
}

/// What can be missing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
#[serde(rename_all = "snake_case")]
pub enum GapSource {
    /// The figures of the machine.
    System,
    /// The figures of the process.
    Process,
    /// All GPUs: no driver, or it went away.
    Gpus,
    /// The GPU with this number.
    Gpu(u32),
    /// Time itself: a clock was set, or stood still.
    Clock,
    /// The file of JSON lines: nothing more is written to it.
    File,
}

impl fmt::Display for GapSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::System => f.write_str("system"),
            Self::Process => f.write_str("process"),
            Self::Gpus => f.write_str("GPUs"),
            Self::Gpu(index) => write!(f, "GPU {index}"),
            Self::Clock => f.write_str("clock"),
            Self::File => f.write_str("file"),
        }
    }
}

/// The gaps so far.
#[derive(Clone, Debug, Default)]
pub(super) struct Gaps(VecDeque<MonitorGap>);

impl Gaps {
    pub fn list(&self) -> Vec<MonitorGap> {
        self.0.iter().cloned().collect()
    }

    /// Opens a gap unless one is open for this source. Returns whether it did.
    pub fn open(&mut self, source: GapSource, at: Duration, reason: impl fmt::Display) -> bool {
        if self.0.iter().any(|gap| gap.source == source && gap.to_seconds.is_none()) {
            return false;
        }
        self.push(MonitorGap { source, from_seconds: at.as_secs_f64(), to_seconds: None, reason: reason.to_string() });
        true
    }

    /// Closes the open gap of a source, if there is one.
    pub fn close(&mut self, source: GapSource, at: Duration) {
        let open = self.0.iter_mut().find(|gap| gap.source == source && gap.to_seconds.is_none());
        if let Some(gap) = open {
            gap.to_seconds = Some(at.as_secs_f64());
        }
    }

    /// Adds a gap that is already over.
    pub fn note(&mut self, source: GapSource, from: Duration, to: Duration, reason: String) {
        let (from_seconds, to_seconds) = (from.as_secs_f64(), Some(to.as_secs_f64()));
        self.push(MonitorGap { source, from_seconds, to_seconds, reason });
    }

    fn push(&mut self, gap: MonitorGap) {
        if self.0.len() == MOST_GAPS {
            self.0.pop_front();
        }
        self.0.push_back(gap);
    }
}
