//! Speed and memory beside PyTorch and other peers, interleaved in one run.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use clap::Args;

use crate::workspace::{self, Workspace};
use crate::{python, setup};

/// Measure one case beside PyTorch and other peers, interleaved in one run
///
/// Prints medians of ratios, and writes them with `--json PATH`. A peer that is not installed is named as missing. A
/// missed target is reported, and is not a failure.
#[derive(Args)]
pub struct Options {
    /// The case (`step`, `optim`, ..), then options; `CASE --help` lists them
    #[arg(value_name = "CASE", required = true, trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

pub fn run(ws: &Workspace, options: &Options) -> Result<ExitCode> {
    let libtorch = setup::quietly(ws)?;
    let run = ["run", "--release", "--package", "overdrive-benches", "--bin", "overdrive-versus", "--"];
    let mut command = ws.cargo_here(run);
    command.env("OVERDRIVE_PYTHON", python::with_torch(ws, &libtorch)?).args(&options.args);
    Ok(workspace::exit_code(workspace::status(&mut command)?))
}
