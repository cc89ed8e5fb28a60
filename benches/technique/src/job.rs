//! What a contender is told, and what it says: the same JSON for our processes and for Python's.
//!
//! A process gets its [`Job`] as an argument and says [`Said::Ready`]. Then each [`Ask`] on its standard input, a line each,
//! is answered by one line on its standard output; at the end of the input it says [`Said::End`] and ends.

use std::io::{BufRead, Write};
use std::path::PathBuf;

use anyhow::{Context, Result};
use overdrive_bench_report::{Contender, DeviceKind, Span, Turn, Whole, Workload};
use serde::{Deserialize, Serialize};

/// What to train, and how.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// What.
    pub workload: Workload,
    /// As whom.
    pub contender: Contender,
    /// What is changed of plain tch; nothing for Python.
    pub parts: Vec<Contender>,
    /// Where.
    pub device: DeviceKind,
    /// Seed of weights and order.
    pub seed: u32,
    /// The most threads that compute.
    pub threads: u32,
    /// Images or pieces of text a step.
    pub batch_size: usize,
    /// Whether there is time to try alternatives at the start.
    pub tries: bool,
    /// Whether the device multiplies bfloat16 numbers in hardware: who does not try it uses it then.
    pub has_bf16: bool,
    /// What tuned Python has chosen, for the compiled one; null before.
    pub options: serde_json::Value,
    /// Seconds before each turn that do not count, where batches are read ahead: what was read meanwhile is used up.
    pub settle_seconds: f64,
    /// Seconds of a turn, which ends with a whole step.
    pub turn_seconds: f64,
    /// Epochs of a whole training, or the steps of it where there are no epochs.
    pub length: u64,
    /// The training data: a folder of images by class, or a text.
    pub train: PathBuf,
    /// The test data: MNIST's idx files, a folder of images by class, or nothing.
    pub test: Option<PathBuf>,
    /// How many images of it, from the first.
    pub test_images: usize,
}

/// What a process is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// Train some steps and say how long they took.
    Turn,
    /// Start again with a seed and train to the end.
    Whole(u32),
    /// Train a few steps and say what they consist of.
    Steps,
}

/// What a process says.
#[derive(Debug, Serialize, Deserialize)]
pub enum Said {
    /// It has its data and has trained a few steps.
    Ready {
        /// What it has chosen by measuring.
        choices: Vec<String>,
        /// The job's parts that it kept; Python says nothing of them.
        #[serde(default)]
        parts: Vec<Contender>,
        /// What Python's has chosen, to be given to another of Python's as the job's options.
        #[serde(default)]
        options: serde_json::Value,
    },
    /// It cannot run here; the reason.
    Missing(String),
    /// After [`Ask::Turn`].
    Turn(Turn),
    /// After [`Ask::Whole`].
    Whole(Whole),
    /// After [`Ask::Steps`].
    Steps {
        /// Phase by phase.
        timeline: Vec<Span>,
        /// What the diagnosis says would help, a sentence each.
        next: Vec<String>,
    },
    /// The last line.
    End {
        /// The most memory allocated on the device.
        peak_device_bytes: Option<u64>,
    },
}

impl Job {
    /// Whether this is changed of plain tch.
    pub fn has(&self, part: Contender) -> bool {
        self.parts.contains(&part)
    }

    /// Batches that a step adds up.
    pub fn micro_batches(&self) -> usize {
        if self.has(Contender::Accumulate) { 2 } else { 1 }
    }
}

/// Whether batches are made by threads beside the one that trains.
pub fn has_workers(job: &Job) -> bool {
    [Contender::Prefetch, Contender::CachePrefetch, Contender::ScaledDecode].into_iter().any(|part| job.has(part))
}

/// Says one thing on standard output.
///
/// # Errors
/// When nobody listens.
pub fn say(said: &Said) -> Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, said).context("cannot report to the bench")?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}

/// What the process is asked, until its input ends.
pub fn asked() -> impl Iterator<Item = Result<Ask>> {
    std::io::stdin().lock().lines().map(|line| Ok(serde_json::from_str(&line?)?))
}
