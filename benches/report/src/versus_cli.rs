//! The command line of `cargo xtask versus`, shared by the program that obeys it and by xtask, which shows its help and
//! refuses wrong options before it builds.

use std::path::PathBuf;

use clap::{Args, Parser, ValueEnum};
use thiserror::Error;

use crate::cli::{program, python_by_default};

/// Measures one case against PyTorch, plain tch and other tools, interleaved, and prints medians of ratios.
#[derive(Clone, Debug, Parser)]
#[command(name = "versus", max_term_width = 100)]
pub struct VersusOptions {
    /// What to measure
    #[arg(value_enum)]
    pub case: VersusCase,
    /// Write the results to this JSON file
    #[arg(long, value_name = "PATH")]
    pub json: Option<PathBuf>,
    /// How many pairs of samples to take [default: 31 for `step`, 15 for `optim` and `gpu-times`, 9 for `checkpoint`,
    /// `compile`, `gpu-compile`, `host-time` and `load`, 5 to 9 for `ddp`, at most 7 for `loader`, 5 to 201 for `profile`]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(3..=1000))]
    pub pairs: Option<u32>,
    /// A Python with torch 2.11.0; the variable OVERDRIVE_PYTHON names it too
    #[arg(long, value_name = "PATH", default_value_os_t = python_by_default(), value_parser = program)]
    pub python: PathBuf,
    /// Options of `loader`.
    #[command(flatten)]
    pub loader: LoaderOptions,
    /// Options of `ddp`.
    #[command(flatten)]
    pub ddp: DdpOptions,
}

/// What is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum VersusCase {
    /// A training step of a small MLP, and an AdamW step over ResNet-18's parameters, on one thread
    Step,
    /// AdamW steps and gradient clipping over ResNet-50's and GPT-2-small's parameters, on one thread; takes 9 GB of
    /// memory
    Optim,
    /// Saving 1 GB, blocking and in the background; takes 9 GB of memory and 5 GB of disk
    Checkpoint,
    /// Loading 1 GB; takes 9 GB of memory and 3 GB of disk
    Load,
    /// Loading photographs, samples in memory, shards, LMDB and Parquet, against DataLoader, spdl, webdataset and
    /// others
    Loader,
    /// Training on two ranks against PyTorch's DDP, a launch against torchrun, changes of an elastic run's hosts, and
    /// communication hooks over a link of 200 Mbit/s (which needs root)
    Ddp,
    /// The diagnosis' bounds against the gains of its remedies, and the cost of profiling against PyTorch's profiler
    Profile,
    /// What a training step launches, copies and waits for on a GPU, against PyTorch at its best setting: counted on a
    /// stand-in for CUDA's runtime, so it needs no GPU
    GpuCounts,
    /// The time of the same steps on a GPU, against PyTorch with fused AdamW and plain tch
    GpuTimes,
    /// The host's time for a training step on a GPU whose kernels take no time, against PyTorch with fused AdamW: on the
    /// same stand-in
    HostTime,
    /// Compiled training steps against uncompiled ones, PyTorch with fused AdamW and `torch.compile`; compiles for
    /// minutes the first time
    Compile,
    /// The same on a GPU
    GpuCompile,
    /// Activation checkpointing of a transformer, its memory and time, against a plain run and PyTorch's
    Memory,
    /// Memory of ZeRO's stages, the largest model under a cap, and steps against PyTorch's `ZeroRedundancyOptimizer` and
    /// `fully_shard`; takes 12 GB of memory
    Shard,
    /// Started by `compile`: a process that makes its first steps
    #[value(hide = true)]
    CompileStart,
    /// Started by `memory`: a process with saved tensors on disk, whose memory is limited
    #[value(hide = true)]
    MemoryDisk,
    /// Started by `shard`: a rank that measures on request
    #[value(hide = true)]
    ShardRank,
    /// Started by `ddp`: a rank that measures on request
    #[value(hide = true)]
    DdpRank,
    /// Launched by `ddp`: a rank that ends after its first all-reduce
    #[value(hide = true)]
    DdpFirstSum,
    /// Launched by `ddp`: a rank of an elastic run, which trains until it is killed
    #[value(hide = true)]
    DdpMember,
}

/// Options of `loader`.
#[derive(Clone, Debug, Args)]
#[group(skip)] // Otherwise clap gives this group the same name as the one of all options.
pub struct LoaderOptions {
    /// The topics of `loader` to measure, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "TOPIC")]
    pub only: Vec<LoaderTopic>,
    /// Photographs for `loader`: a folder with a subfolder of JPEG files for each class [default: made from
    /// photographs in Debian packages]
    #[arg(long, value_name = "DIR")]
    pub photos: Option<PathBuf>,
}

/// A topic of `loader`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LoaderTopic {
    /// Memory, threads and file descriptors that remain after epochs that stop early, and memory over 200,000 batches
    Resident,
    /// Photographs: decoding, random crops and flips, against DataLoader, spdl, a bare loop and one worker
    Images,
    /// Photographs without a crop, against DataLoader and spdl
    Whole,
    /// The time from making a loader to its first batch, against DataLoader
    Startup,
    /// Small samples in memory, against DataLoader and one index_select per batch
    Memory,
    /// Undecoded samples of tar shards, against webdataset
    #[value(alias = "tar")]
    Shards,
    /// Undecoded samples of MDS shards, against Mosaic Streaming
    Mds,
    /// Photographs of a server whose answers come late, against the same on the disk
    Streams,
    /// Record batches of Arrow in memory, against pyarrow
    Arrow,
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

/// Options of `ddp`.
#[derive(Clone, Debug, Args)]
#[group(skip)]
pub struct DdpOptions {
    /// The parts of `ddp` to measure, separated by commas [default: all]
    #[arg(long, value_enum, value_delimiter = ',', value_name = "PART")]
    pub part: Vec<DdpPart>,
}

/// A part of `ddp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum DdpPart {
    /// A launch of four ranks up to their first all-reduce, against torchrun
    Launch,
    /// An elastic run that loses one of two launchers and gets it back: the time to the next step
    Members,
    /// Whole steps, also with the hook `SharedMemory` and without the exchange, and how much of the all-reduce overlaps with
    /// backward
    Training,
    /// Each communication hook over a link of 200 Mbit/s
    Link,
    /// The hooks that send the fewest bytes, with 16 times as many samples per rank
    #[value(name = "link-16x")]
    Link16x,
    /// The same with 32 times as many samples per rank
    #[value(name = "link-32x")]
    Link32x,
}

/// Options of one case that are given with another, where they would have no effect.
#[derive(Debug, Error, PartialEq, Eq)]
#[error("{options} only for `{of}`, not for `{case}`")]
pub struct OtherCase {
    options: &'static str,
    of: &'static str,
    case: String,
}

impl VersusOptions {
    /// Refuses options of one case that are given with another.
    ///
    /// # Errors
    /// [`OtherCase`], which names the options and their case.
    pub fn check(&self) -> Result<(), OtherCase> {
        let refuse = |options, of| Err(OtherCase { options, of, case: self.case.name() });
        if self.case != VersusCase::Ddp && !self.ddp.part.is_empty() {
            return refuse("--part is", "ddp");
        }
        let of_loader = !self.loader.only.is_empty() || self.loader.photos.is_some();
        if self.case != VersusCase::Loader && of_loader {
            return refuse("--only and --photos are", "loader");
        }
        Ok(())
    }
}

impl VersusCase {
    /// The name on the command line.
    pub fn name(self) -> String {
        self.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
    }

    /// All that a user can ask for, one a line, each with what it measures.
    pub fn list() -> String {
        let shown = Self::value_variants().iter().filter_map(ValueEnum::to_possible_value);
        let line = |value: clap::builder::PossibleValue| {
            let help = value.get_help().map(ToString::to_string).unwrap_or_default();
            let help = crate::text::wrap(&help, 80).replace('\n', &format!("\n{:14}", ""));
            format!("  {:<12}{help}", value.get_name())
        };
        shown.filter(|value| !value.is_hide_set()).map(line).collect::<Vec<_>>().join("\n")
    }
}

impl DdpOptions {
    /// Whether a part is to be measured.
    pub fn has(&self, part: DdpPart) -> bool {
        self.part.is_empty() || self.part.contains(&part)
    }
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::*;

    fn parse(args: &str) -> Result<VersusOptions, clap::Error> {
        VersusOptions::try_parse_from(["versus"].into_iter().chain(args.split(' ')))
    }

    #[test]
    fn the_definition_is_sound_and_wrong_options_are_refused() {
        VersusOptions::command().debug_assert();
        let error = parse("stepp").unwrap_err().to_string();
        assert!(error.contains("'stepp'") && error.contains("loader") && !error.contains("ddp-rank"), "{error}");
        assert!(parse("step --pairs 2").unwrap_err().to_string().contains("3..=1000"));
    }

    #[test]
    fn options_of_another_case_are_refused() {
        let checked = |args: &str| parse(args).unwrap().check().map_err(|error| error.to_string());
        for args in ["step", "ddp", "ddp --part launch,link", "loader --only shards", "ddp-rank"] {
            assert_eq!(checked(args), Ok(()), "{args}");
        }
        for case in ["step", "optim", "checkpoint", "load", "loader", "profile"] {
            let said = checked(&format!("{case} --part link")).unwrap_err();
            assert_eq!(said, format!("--part is only for `ddp`, not for `{case}`"));
        }
        for args in ["--only shards", "--photos ."] {
            let said = checked(&format!("ddp {args}")).unwrap_err();
            assert!(said.contains("for `loader`") && said.ends_with("not for `ddp`"), "{said}");
        }
    }

    #[test]
    fn every_case_that_a_user_can_ask_for_is_listed_with_its_text() {
        let list = VersusCase::list();
        assert!(list.starts_with("  step        A training step of a small MLP"), "{list}");
        let names = list.lines().filter_map(|line| line[2..].split(' ').next()).filter(|name| !name.is_empty());
        let cases = [
            "step",
            "optim",
            "checkpoint",
            "load",
            "loader",
            "ddp",
            "profile",
            "gpu-counts",
            "gpu-times",
            "host-time",
            "compile",
            "gpu-compile",
            "memory",
            "shard",
        ];
        assert_eq!(names.collect::<Vec<_>>(), cases);
        assert!(list.lines().all(|line| line.chars().count() <= 100), "{list}");
    }
}
