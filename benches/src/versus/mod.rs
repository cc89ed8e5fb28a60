//! Compares speed and memory with other tools, interleaved in one run.

mod checkpoint;
mod ddp;
pub mod gpu_counts;
mod host_time;
mod load;
mod loader;
mod optim;
mod packages;
mod peer;
mod profile;
mod step;
mod step_nn;
mod turns;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::{Parser, ValueEnum};
use overdrive_bench_report::VersusReport;
use overdrive_bench_report::write::{check_writable, write_atomically};

/// Measures one case against PyTorch, plain tch and other tools, interleaved, and prints medians of ratios.
#[derive(Debug, Parser)]
#[command(name = "versus", max_term_width = 100)]
pub struct Options {
    /// What to measure
    #[arg(value_enum)]
    case: Case,
    /// Write the results to this JSON file
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,
    /// How many pairs of samples to take [default: 31 for `step`, 15 for `optim`, 9 for `checkpoint`, `host-time` and `load`, 5 to 9
    /// for `ddp`, at most 7 for `loader`, 5 to 201 for `profile`]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(3..=1000))]
    pairs: Option<u32>,
    /// A Python with torch 2.11.0
    #[arg(long, value_name = "PATH", env = "OVERDRIVE_PYTHON", default_value = "python3")]
    python: PathBuf,
    /// Options of `loader`.
    #[command(flatten)]
    loader: loader::Options,
    /// Options of `ddp`.
    #[command(flatten)]
    ddp: ddp::Parts,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Case {
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
    /// Training on two ranks against PyTorch's DDP, a launch against torchrun, and communication hooks over a link of
    /// 200 Mbit/s (which needs root)
    Ddp,
    /// The diagnosis' bounds against the gains of its remedies, and the cost of profiling against PyTorch's profiler
    Profile,
    /// What a training step launches, copies and waits for on a GPU, against PyTorch at its best setting: counted on a
    /// stand-in for CUDA's runtime, so it needs no GPU
    GpuCounts,
    /// The host's time for a training step on a GPU whose kernels take no time, against PyTorch with fused AdamW: on the
    /// same stand-in
    HostTime,
    /// Started by `ddp`: a rank that measures on request
    #[value(hide = true)]
    DdpRank,
    /// Launched by `ddp`: a rank that ends after its first all-reduce
    #[value(hide = true)]
    DdpFirstSum,
}

impl Options {
    /// Refuses options of one case that are given with another, where they would have no effect.
    fn check(&self) -> Result<()> {
        let case = self.case.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
        if !matches!(self.case, Case::Ddp) && self.ddp.are_chosen() {
            bail!("--part is only for `ddp`, not for `{case}`");
        }
        if !matches!(self.case, Case::Loader) && self.loader.are_given() {
            bail!("--only and --photos are only for `loader`, not for `{case}`");
        }
        Ok(())
    }
}

/// The folder that keeps data and Python packages for the next run: in `target` if there is one, else in the folder for
/// temporary files.
fn work_folder() -> PathBuf {
    match Path::new("target").is_dir() {
        true => PathBuf::from("target/versus-data"),
        false => std::env::temp_dir().join("overdrive-versus-data"),
    }
}

/// Measures a case, prints the results, and writes them if the options say so.
///
/// # Errors
/// When an option is not for the case, measuring fails, or the results cannot be written. A missed target is not an
/// error.
pub fn run(options: &Options) -> Result<()> {
    options.check()?;
    if let Some(path) = &options.json {
        check_writable(path)?;
    }
    let mut report: VersusReport = match options.case {
        Case::Step => step::measure(options)?,
        Case::Optim => optim::measure(options)?,
        Case::Checkpoint => checkpoint::measure(options)?,
        Case::Load => load::measure(options)?,
        Case::Loader => loader::measure(options)?,
        Case::Ddp => ddp::measure(options)?,
        Case::Profile => profile::measure(options)?,
        Case::GpuCounts => return gpu_counts::run(&options.python),
        Case::HostTime => host_time::measure(options)?,
        Case::DdpRank => return ddp::rank::serve(),
        Case::DdpFirstSum => return ddp::launch::first_sum(),
    };
    report.pairs_asked = options.pairs;
    print!("{}", report.table());
    if let Some(path) = &options.json {
        write_atomically(path, report.to_json()?.as_bytes())?;
        println!("results: {}", path.display());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checked(args: &str) -> Result<(), String> {
        let options = Options::try_parse_from(["versus"].into_iter().chain(args.split(' '))).unwrap();
        options.check().map_err(|error| error.to_string())
    }

    #[test]
    fn options_of_another_case_are_refused() {
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
}
