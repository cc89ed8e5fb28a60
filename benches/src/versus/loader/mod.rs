//! `versus loader`: the speed of loading against PyTorch's DataLoader, spdl, webdataset, Mosaic Streaming,
//! lmdb-rkv, pyarrow and dataloader-rs, on the same data.
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

mod arrow;
mod autotune;
mod images;
mod index;
mod late_server;
mod lmdb;
mod mds;
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
mod streams;
mod threads;
mod whole;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use clap::ValueEnum;
use overdrive_bench_report::versus_cli::LoaderTopic;
use overdrive_bench_report::{Machine, MissingPeer, VersusReport};

use super::turns::{Findings, Program};

/// Worker threads or processes. The comparisons are meant for two cores.
const WORKERS: usize = 2;
const PAIRS: u32 = 7;

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
    for &topic in LoaderTopic::value_variants().iter().filter(|topic| only.is_empty() || only.contains(topic)) {
        measure_topic(topic, &mut bench)?;
    }
    Ok(bench.findings.report(Machine::detect(None), bench.versions))
}

fn measure_topic(topic: LoaderTopic, bench: &mut Bench) -> Result<()> {
    match topic {
        LoaderTopic::Resident => resident::measure(bench),
        LoaderTopic::Images => images::measure(bench),
        LoaderTopic::Whole => whole::measure(bench),
        LoaderTopic::Startup => startup::measure(bench),
        LoaderTopic::Memory => memory::measure(bench),
        LoaderTopic::Shards => shards::measure(bench),
        LoaderTopic::Mds => mds::measure(bench),
        LoaderTopic::Streams => streams::measure(bench),
        LoaderTopic::Arrow => arrow::measure(bench),
        LoaderTopic::Lmdb => lmdb::measure(bench),
        LoaderTopic::Parquet => parquet::measure(bench),
        #[cfg(feature = "dataloader-rs")]
        LoaderTopic::Overhead => overhead::measure(bench),
        #[cfg(not(feature = "dataloader-rs"))]
        LoaderTopic::Overhead => {
            let reason = "it is not built in: this needs the feature dataloader-rs and Rust 1.95";
            bench.missing("150 kB raw samples", "dataloader-rs", reason);
            Ok(())
        }
        LoaderTopic::Index => index::measure(bench),
        LoaderTopic::Resume => resume::measure(bench),
        LoaderTopic::Autotune => autotune::measure(bench),
        LoaderTopic::Threads => threads::measure(bench),
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
        let install = |modules: &[&str], packages: &[&str]| {
            super::packages::python_with(&self.python, &self.work, modules, packages)
        };
        let made = match name {
            images::DALI => install(&["nvidia.dali"], &[name]),
            // Of what it depends on only what reading imports: the rest are clients of stores, and an older numpy.
            mds::PEER => install(&mds::MODULES, &mds::PACKAGES)
                .and_then(|_| install(&["streaming"], &["--no-deps", "mosaicml-streaming==0.13.0"])),
            name => install(&[name], &[name]),
        };
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
