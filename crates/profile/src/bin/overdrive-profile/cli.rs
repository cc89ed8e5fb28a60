//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, value_parser};

/// More steps than this, before the profiler or under it, are a slip.
const MOST_STEPS: u64 = 1_000_000_000;

/// Finds what a training run waits for
#[derive(Debug, Parser)]
#[command(name = "overdrive-profile", version, max_term_width = 100)]
pub struct Cli {
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    Run(RunOptions),
    Show(ShowOptions),
    Diff(DiffOptions),
}

/// Run a program, record it, and say what bounds it
///
/// The program is one with an optimizer of these crates, or a step timer (`StepTimer`), in its training loop, built with the
/// feature `record` of `overdrive` or `overdrive-profile`. It may be a launcher of several ranks:
///
///   overdrive-profile run -- target/release/train --epochs 3
///   overdrive-profile run --out before -- overdrive-run --nproc-per-node 4 target/release/train
///
/// When it has ended, DIR holds profile.html (open it in a browser), profile.json, and the trace of a few steps as
/// trace.json.gz (for https://ui.perfetto.dev), one a rank. What an earlier run left there is replaced then. The diagnosis
/// goes to standard error, which leaves standard output to the program.
///
/// The exit code is the program's; 128 and the number of a signal; 127 if the program is not there, 126 if it cannot be
/// started; 1 if it has left no record although it ended well.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct RunOptions {
    /// Where the record goes
    #[arg(short, long, value_name = "DIR", default_value = "overdrive-profile")]
    pub out: PathBuf,

    /// How many steps are only timed before the profiler is on, besides those of the timer's warm-up [default: 20]
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(..=MOST_STEPS))]
    pub before: Option<u64>,

    /// How many steps are profiled; 0 for none [default: 5, more of short ones]
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(..=MOST_STEPS))]
    pub steps: Option<u64>,

    /// What is run; what follows the program is its own
    #[arg(value_names = ["PROGRAM", "ARGS"], required = true, num_args = 1.., trailing_var_arg = true)]
    pub command: Vec<OsString>,
}

/// Say once more what bounds a recorded run
///
/// Of a run on several hosts, give the folders of all: the ranks in them are judged together.
///
///   overdrive-profile show host0 host1 --html all.html --json all.json
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct ShowOptions {
    /// A folder that `run` has filled, or the profile.json in it; the folders of several hosts, or the profile.rank*.json
    /// in them
    #[arg(value_name = "DIR|FILE", required = true)]
    pub records: Vec<PathBuf>,

    /// Write the page there as well
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,

    /// Write the record there as well, with all ranks in one: `diff` takes it
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Compare two recorded runs: what got faster, what slower, beyond noise
///
/// Median steps and phases, throughput, operators and memory. Noise is that between the steps within each run, where a
/// step may depend on those before it. Two runs of one program differ for more reasons than that.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct DiffOptions {
    /// The run before a change: a folder that `run` has filled, or the profile.json in it
    #[arg(value_name = "BEFORE")]
    pub before: PathBuf,

    /// The run after it
    #[arg(value_name = "AFTER")]
    pub after: PathBuf,

    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory as _;

    use super::*;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn what_comes_after_the_program_is_its_own() {
        let cli = Cli::parse_from(["overdrive-profile", "run", "--steps=3", "train", "--out", "x", "--", "-h"]);
        let Command::Run(options) = cli.command else { panic!("{cli:?}") };
        assert_eq!((options.steps, options.out), (Some(3), PathBuf::from("overdrive-profile")));
        assert_eq!(options.command, ["train", "--out", "x", "--", "-h"]);
    }
}
