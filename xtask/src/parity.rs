//! Runs the same computations here and in Python's PyTorch, with the same libtorch, and compares number by number.

use std::ffi::OsString;
use std::process::{Command, ExitCode, ExitStatus};

use anyhow::Result;
use clap::Args;

use crate::workspace::{self, Workspace};
use crate::{python, setup};

/// Compare this workspace with Python's PyTorch, number by number; the last line has the totals
#[derive(Args)]
pub struct Options {
    /// Run the cases whose names contain this; `--verbose` after it prints every value compared
    #[arg(value_name = "FILTER", trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

pub fn run(ws: &Workspace, options: &Options) -> Result<ExitCode> {
    Ok(workspace::exit_code(workspace::status(command(ws)?.args(&options.args))?))
}

/// Runs every case; returns the exit status and the harness's line with the totals.
pub fn all(ws: &Workspace) -> Result<(ExitStatus, String)> {
    let mut totals = String::new();
    let status = workspace::tee(&mut command(ws)?, |line| {
        if line.contains(" passed, ") {
            totals = line.to_owned();
        }
    })?;
    Ok((status, totals))
}

fn command(ws: &Workspace) -> Result<Command> {
    let libtorch = setup::quietly(ws)?;
    let mut command = ws.cargo_here(["run", "--quiet", "--package", "overdrive-parity", "--"]);
    command.env("OVERDRIVE_PYTHON", python::with_torch(ws, &libtorch)?);
    Ok(command)
}
