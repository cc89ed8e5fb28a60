//! The command line.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Parser, Subcommand, value_parser};

/// The largest number of steps that is accepted; a larger one is taken for a typing mistake.
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

/// Run a program, record it, and report what bounds it
///
/// The program's training loop needs an optimizer of these crates or a step timer (`StepTimer`), and it has to be built
/// with the feature `record` of `overdrive` or `overdrive-profile`. It can be a launcher of several ranks:
///
///   overdrive-profile run -- target/release/train --epochs 3
///   overdrive-profile run --out before -- overdrive-run --nproc-per-node 4 target/release/train
///
/// When it has ended, DIR holds profile.html (open it in a browser), profile.json, and the trace of a few steps as
/// trace.json.gz (for https://ui.perfetto.dev), one per rank. Files of an earlier run are replaced then. The diagnosis
/// is printed on standard error, so standard output is the program's alone.
///
/// The exit code is the program's, or 128 plus the number of its signal; 127 if the program is not found, 126 if it
/// cannot be started; 1 if it exited with 0 but left no record.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct RunOptions {
    /// Folder for the record
    #[arg(short, long, value_name = "DIR", default_value = "overdrive-profile")]
    pub out: PathBuf,

    /// How many steps are only timed, after the timer's warm-up and before the profiler is on [default: 20]
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(..=MOST_STEPS))]
    pub before: Option<u64>,

    /// How many steps are profiled; 0 for none [default: 5, more of short ones]
    #[arg(long, value_name = "N", value_parser = value_parser!(u64).range(..=MOST_STEPS))]
    pub steps: Option<u64>,

    /// The program and its arguments
    #[arg(value_names = ["PROGRAM", "ARGS"], required = true, num_args = 1.., trailing_var_arg = true)]
    pub command: Vec<OsString>,
}

/// Report again what bounds a recorded run
///
/// For a run on several hosts, give the folders of all hosts: their ranks are diagnosed together.
///
///   overdrive-profile show host0 host1 --html all.html --json all.json
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct ShowOptions {
    /// A folder that `run` has filled, or its profile.json; for several hosts, their folders or the profile.rank*.json
    /// in them
    #[arg(value_name = "DIR|FILE", required = true)]
    pub records: Vec<PathBuf>,

    /// Also write the page to FILE
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,

    /// Also write the record, with all ranks in one, to FILE; `diff` can read it
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// Compare two recorded runs: what got faster, what slower, beyond noise
///
/// Compares median steps and phases, throughput, operators and memory. Noise is the variation between steps within each
/// run, including autocorrelation. Repeated runs of one program differ for further reasons.
#[derive(Args, Debug)]
#[command(verbatim_doc_comment)]
pub struct DiffOptions {
    /// The run before a change: a folder that `run` has filled, or its profile.json
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
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn arguments_after_the_program_are_the_programs() {
        let cli = Cli::parse_from(["overdrive-profile", "run", "--steps=3", "train", "--out", "x", "--", "-h"]);
        let Command::Run(options) = cli.command else { panic!("{cli:?}") };
        assert_eq!((options.steps, options.out), (Some(3), PathBuf::from("overdrive-profile")));
        assert_eq!(options.command, ["train", "--out", "x", "--", "-h"]);
    }
}
