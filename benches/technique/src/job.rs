//! The protocol between the benchmark and a contender's process: JSON lines, the same for our programs and for Python's.
//!
//! A process gets its [`Job`] as an argument and prints [`Said::Ready`]. It answers each [`Ask`], one per line of its
//! standard input, with one line on its standard output. When the input ends, it prints [`Said::End`] and exits.

use std::io::{BufRead, Write};
use std::path::PathBuf;

use anyhow::{Context, Result};
use overdrive_bench_report::{Contender, DeviceKind, Span, Turn, Versions, Whole, Workload};
use overdrive_dataload::ComputeThreads;
use serde::{Deserialize, Serialize};

/// What to train, and how.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Job {
    /// The workload.
    pub workload: Workload,
    /// The contender.
    pub contender: Contender,
    /// The techniques to use; empty for plain tch and for Python.
    pub parts: Vec<Contender>,
    /// The device.
    pub device: DeviceKind,
    /// Seed of weights and order.
    pub seed: u32,
    /// The most threads that compute.
    pub threads: u32,
    /// Images, or pieces of text, per step.
    pub batch_size: usize,
    /// Whether contenders may choose options by measuring at their start. Off for a quick run.
    pub tries: bool,
    /// Whether the combined contender tries to compile, which takes a minute.
    #[serde(default)]
    pub compiles: bool,
    /// Whether the device multiplies bfloat16 in hardware. If nothing is tried, tuned Python and ours then use it.
    pub has_bf16: bool,
    /// The options that tuned Python has chosen, for compiled Python; null until they are known.
    pub options: serde_json::Value,
    /// Seconds of training before a turn that do not count, until the loader is as busy as in a long training.
    pub settle_seconds: f64,
    /// Seconds of a turn; it ends after a whole step.
    pub turn_seconds: f64,
    /// Epochs of a whole training; for text, steps.
    pub length: u64,
    /// The training data: a folder of images by class, or a text.
    pub train: PathBuf,
    /// The test data, if any: the folder of MNIST's idx files, or a folder of images by class.
    pub test: Option<PathBuf>,
    /// Test images to use, from the first.
    pub test_images: usize,
}

/// A request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Ask {
    /// Make the first steps, which are slow.
    Warm,
    /// Train for `turn_seconds` and report the time.
    Turn,
    /// Train new weights with this seed, up to the first mark.
    Whole(u32),
    /// Go on to the next mark.
    Mark,
    /// Record a few steps.
    Steps,
}

/// An answer.
#[derive(Debug, Serialize, Deserialize)]
pub enum Said {
    /// The data is open. It warms up before it answers its first request.
    Ready {
        /// What it has chosen by measuring, as text.
        choices: Vec<String>,
        /// The techniques that it uses.
        #[serde(default)]
        parts: Vec<Contender>,
        /// The techniques that it has tried and left out.
        #[serde(default)]
        left_out: Vec<Contender>,
        /// The options that tuned Python has chosen; see [`Job::options`].
        #[serde(default)]
        options: serde_json::Value,
        /// Python's software.
        #[serde(default)]
        versions: Versions,
    },
    /// It cannot run here, for this reason.
    Missing(String),
    /// After [`Ask::Warm`].
    Warm,
    /// After [`Ask::Turn`].
    Turn(Turn),
    /// At each mark but the last.
    Mark,
    /// At the last mark.
    Whole(Whole),
    /// After [`Ask::Steps`].
    Steps {
        /// The phases of a few steps.
        timeline: Vec<Span>,
        /// What would help next according to the diagnosis, one sentence each.
        next: Vec<String>,
    },
    /// The last line.
    End {
        /// The most memory allocated on the device.
        peak_device_bytes: Option<u64>,
    },
}

impl Job {
    /// Whether the job uses a technique.
    pub fn has(&self, part: Contender) -> bool {
        self.parts.contains(&part)
    }

    /// Micro-batches per step.
    pub fn micro_batches(&self) -> usize {
        if self.has(Contender::Accumulate) { 2 } else { 1 }
    }
}

/// Whether a loader's worker threads prepare the batches.
pub fn has_workers(job: &Job) -> bool {
    let loaders = [Contender::Prefetch, Contender::CachePrefetch, Contender::TakeTurns, Contender::ScaledDecode];
    loaders.into_iter().any(|part| job.has(part))
}

/// With how many threads libtorch computes in turns with the workers; `None` if it always does.
pub fn threads_in_turns(job: &Job) -> Option<ComputeThreads> {
    let alone = i32::try_from(job.threads).ok()?;
    let threads = ComputeThreads { beside_workers: (alone / 2).max(1), alone };
    job.has(Contender::TakeTurns).then_some(threads)
}

/// Prints one answer on standard output.
///
/// # Errors
/// When standard output is closed.
pub fn say(said: &Said) -> Result<()> {
    let mut out = std::io::stdout().lock();
    serde_json::to_writer(&mut out, said).context("cannot report to the bench")?;
    out.write_all(b"\n")?;
    Ok(out.flush()?)
}

/// The requests on standard input.
pub fn asked() -> impl Iterator<Item = Result<Ask>> {
    std::io::stdin().lock().lines().map(|line| Ok(serde_json::from_str(&line?)?))
}
