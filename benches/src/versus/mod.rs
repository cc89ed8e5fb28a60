//! Speed beside other tools, interleaved in one run.

mod checkpoint;
mod ddp;
mod loader;
mod optim;
mod packages;
mod peer;
mod profile;
mod step;
mod turns;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::{Parser, ValueEnum};
use overdrive_bench_report::VersusReport;
use overdrive_bench_report::write::{check_writable, write_atomically};

/// Measures one case beside PyTorch and tch, in turns, and prints medians of ratios.
#[derive(Debug, Parser)]
#[command(name = "versus", max_term_width = 100)]
pub struct Options {
    /// What to measure
    #[arg(value_enum)]
    case: Case,
    /// Where to write the numbers
    #[arg(long, value_name = "PATH")]
    json: Option<PathBuf>,
    /// How many pairs of samples to take [default: 31 for `step`, 15 for `optim`, 9 for `checkpoint` and
    /// `ddp`, 7 for `loader`, 5 to 31 for `profile`]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(3..=1000))]
    pairs: Option<u32>,
    /// The Python that has torch 2.11.0
    #[arg(long, value_name = "PATH", env = "OVERDRIVE_PYTHON", default_value = "python3")]
    python: PathBuf,
    /// What `loader` does.
    #[command(flatten)]
    loader: loader::Options,
    /// What `ddp` does.
    #[command(flatten)]
    ddp: ddp::Parts,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Case {
    /// A training step of a small perceptron, and an AdamW step over ResNet-18's parameters, on one thread
    Step,
    /// AdamW steps and clipping over ResNet-50's and GPT-2-small's parameters, on one thread; takes 9 GB of memory
    Optim,
    /// Saving 1 GB in the background and waited for, and loading it; takes 9 GB of memory and 5 GB of disk
    Checkpoint,
    /// Loading photographs, samples in memory and shards, beside DataLoader, spdl, webdataset and dataloader-rs
    Loader,
    /// Training on two ranks beside PyTorch's DDP, a launch beside torchrun's, and hooks over a link of 200 Mbit/s (as root)
    Ddp,
    /// The diagnosis' bounds beside what its remedies gain, and what profiling costs beside PyTorch's profiler
    Profile,
    /// What `ddp` starts: a rank that measures what it is told to
    #[value(hide = true)]
    DdpRank,
    /// What `ddp` launches: a rank that ends with its first sum
    #[value(hide = true)]
    DdpFirstSum,
}

impl Options {
    /// That what chooses a share of one case is not given with another, which would measure everything all the same.
    fn check(&self) -> Result<()> {
        let case = self.case.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned());
        if !matches!(self.case, Case::Ddp) && self.ddp.are_chosen() {
            bail!("--part is for `ddp`, the only case that has parts, and not for `{case}`");
        }
        if !matches!(self.case, Case::Loader) && self.loader.are_given() {
            bail!("--only and --photos are for `loader`, the only case that has topics, and not for `{case}`");
        }
        Ok(())
    }
}

/// Where data and packages of the comparisons are kept for the next time: with the build's other outputs, where there are
/// any.
fn work_folder() -> PathBuf {
    match Path::new("target").is_dir() {
        true => PathBuf::from("target/versus-data"),
        false => std::env::temp_dir().join("overdrive-versus-data"),
    }
}

/// Measures, prints and writes what the options ask for.
///
/// # Errors
/// When an option is not for the case, nothing can be measured, or the numbers cannot be written. A missed target is no error.
pub fn run(options: &Options) -> Result<()> {
    options.check()?;
    if let Some(path) = &options.json {
        check_writable(path)?;
    }
    let mut report: VersusReport = match options.case {
        Case::Step => step::measure(options)?,
        Case::Optim => optim::measure(options)?,
        Case::Checkpoint => checkpoint::measure(options)?,
        Case::Loader => loader::measure(options)?,
        Case::Ddp => ddp::measure(options)?,
        Case::Profile => profile::measure(options)?,
        Case::DdpRank => return ddp::rank::serve(),
        Case::DdpFirstSum => return ddp::launch::first_sum(),
    };
    report.pairs_asked = options.pairs;
    print!("{}", report.table());
    if let Some(path) = &options.json {
        write_atomically(path, report.to_json()?.as_bytes())?;
        println!("numbers: {}", path.display());
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
    fn parts_and_topics_are_refused_where_there_are_none() {
        for args in ["step", "ddp", "ddp --part launch,link", "loader --only shards", "ddp-rank"] {
            assert_eq!(checked(args), Ok(()), "{args}");
        }
        for case in ["step", "optim", "checkpoint", "loader", "profile"] {
            let said = checked(&format!("{case} --part link")).unwrap_err();
            assert_eq!(said, format!("--part is for `ddp`, the only case that has parts, and not for `{case}`"));
        }
        for args in ["--only shards", "--photos ."] {
            let said = checked(&format!("ddp {args}")).unwrap_err();
            assert!(said.contains("for `loader`") && said.ends_with("not for `ddp`"), "{said}");
        }
    }
}
