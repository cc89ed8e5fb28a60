//! `versus loader`: what loading costs beside PyTorch's DataLoader, spdl, webdataset, lmdb-rkv, pyarrow and
//! dataloader-rs, on the same data and on all cores.
//!
//! Every topic is a file. It starts its peers, takes samples in turns and adds its rows to the findings. A peer works
//! through whole epochs, so that nothing of it runs while another is timed.

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

/// Worker threads and processes: the comparisons are for two cores.
const WORKERS: usize = 2;
const PAIRS: u32 = 7;

/// What `loader` measures.
#[derive(Debug, Args)]
#[group(skip)] // clap would name it as that of all options.
pub struct Options {
    /// What to measure of `loader`, separated by commas; everything unless set
    #[arg(long, value_enum, value_delimiter = ',', value_name = "TOPIC")]
    only: Vec<Topic>,
    /// Photographs for `loader`: a folder with a sub-folder of JPEG files for every class [default: made from
    /// photographs that Debian packages]
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
    /// Resident memory, threads and descriptors after epochs that were broken off
    Resident,
    /// Photographs: decoding, random crops and flips, beside DataLoader and spdl, a bare loop and one worker
    Images,
    /// From a loader that is made to its first batch
    Startup,
    /// Small samples in memory, beside DataLoader and one index_select a batch
    Memory,
    /// Undecoded samples of tar shards, beside webdataset
    #[value(alias = "tar")]
    Shards,
    /// Values of an LMDB database, beside lmdb-rkv alone
    Lmdb,
    /// Columns of a Parquet file, beside pyarrow
    Parquet,
    /// Raw samples in memory, beside dataloader-rs
    Overhead,
    /// 1.2 million entries: their scan, and the first batch after it
    Index,
    /// A state that is put back in the middle of an epoch, and the first batch after it
    Resume,
    /// Workers and prefetching that the loader chose, beside the best of a grid
    Autotune,
    /// libtorch's threads, workers, and their priority, beside a training loop that computes
    Threads,
}

/// What the topics share.
struct Bench {
    /// Has torch.
    python: PathBuf,
    /// Where data and packages are kept.
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
        // Peers are told of files in it, wherever they run.
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
                let reason = "it is not built in; the feature dataloader-rs does that, from Rust 1.95 on";
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
    /// A peer of PyTorch's: nothing but what `cargo xtask setup` installs.
    fn torch(&mut self, source: &str, options: &serde_json::Value) -> Program {
        let program = Program::start(&self.python, source, options, "see `cargo xtask setup`");
        self.note("torch (Python)", &program);
        program
    }

    /// A peer that needs a package of its own.
    fn packaged(&mut self, name: &str, source: &str, options: &serde_json::Value, remedy: &str) -> Program {
        let made = super::packages::python_with(&self.python, &self.work, &[name], &[name]);
        let program = match made {
            Ok(python) => Program::start(&python, source, options, remedy),
            Err(error) => Program::missing(format!("{error:#}; {remedy}")),
        };
        self.note(name, &program);
        program
    }

    fn note(&mut self, name: &str, program: &Program) {
        if let Some(version) = program.version() {
            self.versions.insert(name.to_owned(), version);
        }
    }

    fn missing(&mut self, case: &str, peer_name: &str, reason: &str) {
        let [case, peer_name, reason] = [case, peer_name, reason].map(str::to_owned);
        self.findings.missing.push(MissingPeer { case, peer_name, reason });
    }

    /// The photographs; where there are none, `case` is noted as missing.
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

/// A path as an argument in JSON.
fn shown(path: &Path) -> String {
    path.display().to_string()
}
