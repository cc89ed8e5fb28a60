//! `versus loader`: the speed of loading against PyTorch's DataLoader, spdl, webdataset, lmdb-rkv, pyarrow and
//! dataloader-rs, on the same data.
//!
//! Every topic has its own file, which starts the peers, takes interleaved samples and adds rows to the findings. A
//! peer is asked for whole epochs, so that its workers are idle while another one is timed. DALI reads two batches
//! ahead after an epoch: it answers when it has them, and takes them before its next sample is timed.

/// The text of a case in which ours decodes photographs. With another decoder it is another case, so that the page of
/// all records does not take both for one.
macro_rules! photographs {
    ($text:literal) => {
        if cfg!(feature = "libjpeg-turbo") { concat!($text, ", ours with libjpeg-turbo") } else { $text }
    };
}

mod autotune;
mod images;
mod index;
mod lmdb;
mod memory;
#[cfg(feature = "dataloader-rs")]
mod overhead;
mod parquet;
mod photos;
mod process;
mod resident;
mod resume;
mod shards;
mod startup;
mod threads;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use overdrive_bench_report::versus::SCHEMA;
use overdrive_bench_report::{Machine, MissingPeer, VersusReport};

use super::turns::{Findings, Program};

/// Worker threads or processes. The comparisons are meant for two cores.
const WORKERS: usize = 2;
const PAIRS: u32 = 7;

/// Options of `loader`.
#[derive(Debug, Args)]
#[group(skip)] // Otherwise clap gives this group the same name as the one of all options.
pub struct Options {
    /// The topics of `loader` to measure, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "TOPIC")]
    only: Vec<Topic>,
    /// Photographs for `loader`: a folder with a subfolder of JPEG files for each class [default: made from
    /// photographs in Debian packages]
    #[arg(long, value_name = "DIR")]
    photos: Option<PathBuf>,
}

impl Options {
    /// Whether any were given.
    pub fn are_given(&self) -> bool {
        !self.only.is_empty() || self.photos.is_some()
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Topic {
    /// Memory, threads and file descriptors that remain after epochs that stop early
    Resident,
    /// Photographs: decoding, random crops and flips, against DataLoader, spdl, a bare loop and one worker
    Images,
    /// The time from making a loader to its first batch, against DataLoader
    Startup,
    /// Small samples in memory, against DataLoader and one index_select per batch
    Memory,
    /// Undecoded samples of tar shards, against webdataset
    #[value(alias = "tar")]
    Shards,
    /// Values of an LMDB database, against lmdb-rkv
    Lmdb,
    /// Columns of a Parquet file, against pyarrow
    Parquet,
    /// Raw samples in memory, against dataloader-rs
    Overhead,
    /// 1.2 million entries: the time to scan them, and to get the first batch after that
    Index,
    /// The time to load a state in the middle of an epoch, and to get the first batch after that
    Resume,
    /// Automatic workers and prefetching, against the best setting of a grid
    Autotune,
    /// Numbers of libtorch's threads and of workers, and the workers' nice value, in a loop that computes
    Threads,
}

/// Shared by the topics.
struct Bench {
    /// A Python with torch.
    python: PathBuf,
    /// The folder that keeps data and Python packages for the next run.
    work: PathBuf,
    photos: Option<PathBuf>,
    pairs: u32,
    versions: BTreeMap<String, String>,
    findings: Findings,
}

pub fn measure(options: &super::Options) -> Result<VersusReport> {
    let work = super::work_folder();
    std::fs::create_dir_all(&work).with_context(|| format!("cannot make {}", work.display()))?;
    let ours = [("overdrive", env!("CARGO_PKG_VERSION")), ("tch", "0.24.0"), ("libtorch", "2.11.0")];
    let mut bench = Bench {
        python: options.python.clone(),
        // Peers get paths of files in it, so it must not depend on the current folder.
        work: work.canonicalize()?,
        photos: options.loader.photos.clone(),
        pairs: options.pairs.unwrap_or(PAIRS),
        versions: ours.map(|(name, version)| (name.to_owned(), version.to_owned())).into(),
        findings: Findings::default(),
    };
    let only = &options.loader.only;
    for &topic in Topic::value_variants().iter().filter(|topic| only.is_empty() || only.contains(topic)) {
        topic.measure(&mut bench)?;
    }
    let Bench { versions, findings: Findings { rows, missing }, .. } = bench;
    Ok(VersusReport { schema: SCHEMA, machine: Machine::detect(None), versions, rows, missing, pairs_asked: None })
}

impl Topic {
    fn measure(self, bench: &mut Bench) -> Result<()> {
        match self {
            Self::Resident => resident::measure(bench),
            Self::Images => images::measure(bench),
            Self::Startup => startup::measure(bench),
            Self::Memory => memory::measure(bench),
            Self::Shards => shards::measure(bench),
            Self::Lmdb => lmdb::measure(bench),
            Self::Parquet => parquet::measure(bench),
            #[cfg(feature = "dataloader-rs")]
            Self::Overhead => overhead::measure(bench),
            #[cfg(not(feature = "dataloader-rs"))]
            Self::Overhead => {
                let reason = "it is not built in: this needs the feature dataloader-rs and Rust 1.95";
                bench.missing("150 kB raw samples", "dataloader-rs", reason);
                Ok(())
            }
            Self::Index => index::measure(bench),
            Self::Resume => resume::measure(bench),
            Self::Autotune => autotune::measure(bench),
            Self::Threads => threads::measure(bench),
        }
    }
}

impl Bench {
    /// Starts a peer that needs only what `cargo xtask setup` installs.
    fn torch(&mut self, source: &str, options: &serde_json::Value) -> Program {
        let program = Program::start(&self.python, source, options, "see `cargo xtask setup`");
        self.note_version("torch (Python)", &program);
        program
    }

    /// Starts a peer that needs another Python package, and installs that if necessary.
    fn packaged(&mut self, name: &str, source: &str, options: &serde_json::Value, remedy: &str) -> Program {
        let module = if name == images::DALI { "nvidia.dali" } else { name };
        let made = super::packages::python_with(&self.python, &self.work, &[module], &[name]);
        let program = match made {
            Ok(python) => Program::start(&python, source, options, remedy),
            Err(error) => Program::missing(format!("{error:#}; {remedy}")),
        };
        self.note_version(name, &program);
        program
    }

    fn note_version(&mut self, name: &str, program: &Program) {
        if let Some(version) = program.version() {
            self.versions.insert(name.to_owned(), version);
        }
    }

    fn missing(&mut self, case: &str, peer_name: &str, reason: &str) {
        let [case, peer_name, reason] = [case, peer_name, reason].map(str::to_owned);
        self.findings.missing.push(MissingPeer { case, peer_name, reason });
    }

    /// The folder of photographs. If there is none, `case` is reported as missing.
    fn photos(&mut self, case: &str) -> Option<PathBuf> {
        if let Some(folder) = &self.photos {
            return Some(folder.clone());
        }
        match photos::make(&self.python, &self.work) {
            Ok(folder) => Some(self.photos.insert(folder).clone()),
            Err(error) => {
                self.missing(case, "everything", &format!("{error:#}; give a folder of photographs with --photos"));
                None
            }
        }
    }
}

/// A path as text, for JSON.
fn path_text(path: &Path) -> String {
    path.display().to_string()
}
