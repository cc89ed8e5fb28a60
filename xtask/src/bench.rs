//! The technique benchmark: trains as Python's PyTorch, as plain tch and with each technique, and shows what each gains.

use std::ffi::OsString;
use std::process::ExitCode;

use anyhow::Result;
use clap::{Args, Parser};
use overdrive_bench_report::BenchOptions;

use crate::workspace::{self, Workspace};
use crate::{python, setup};

/// Train as Python's PyTorch, as plain tch and with each technique, in turns, and show what each gains
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
    let build = ["--release", "--package", "overdrive-bench"];
    let libtorch = setup::before_build(ws, &build)?;
    let mut command = ws.cargo_here(["run"].iter().chain(&build));
    // Without one, Python's columns are absent, and the report says why.
    if let Ok(python) = python::with_torch(ws, &libtorch) {
        command.env("OVERDRIVE_PYTHON", python);
    }
    Ok(workspace::exit_code(workspace::status(command.arg("--").args(&options.args))?))
}
