//! The technique benchmark: trains on real data with and without each technique, and shows what each one gained.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser};
use overdrive_bench_report::BenchOptions;

use crate::setup;
use crate::workspace::{self, Workspace};

/// Train on real data with and without each technique, and show what each one gained
#[derive(Args)]
#[command(disable_help_flag = true)]
pub struct Options {
    /// Options of `overdrive-bench`
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

pub fn run(ws: &Workspace, options: &Options) -> Result<ExitCode> {
    // Parsed here too, so that help and wrong options are reported before minutes of building.
    BenchOptions::parse_from([OsString::from("cargo xtask bench")].iter().chain(&options.args));
    setup::quietly(ws)?;
    let run = ["run", "--release", "--package", "overdrive-benches", "--bin", "overdrive-bench", "--"];
    Ok(workspace::exit_code(workspace::status(ws.cargo_here(run).args(&options.args))?))
}
