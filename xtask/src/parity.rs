//! Runs the same computations here and in Python's PyTorch, with the same libtorch, and compares number by number.

use std::ffi::OsString;
use std::process::{Command, ExitCode, ExitStatus};

use anyhow::{Context, Result};
use clap::{Args, Command as Cli};

use crate::workspace::{self, Workspace};
use crate::{artifacts, python, setup};

/// Compare this workspace with Python's PyTorch, number by number; the last line has the totals
#[derive(Args)]
pub struct Options {
    /// Run the cases whose names contain this; `--verbose` after it prints every value compared. `recipes` runs the
    /// recipes beside their Python counterparts instead, and those whose names contain what follows
    #[arg(value_name = "FILTER", trailing_var_arg = true, allow_hyphen_values = true)]
    args: Vec<OsString>,
}

pub fn run(ws: &Workspace, options: &Options) -> Result<ExitCode> {
    // After a name, clap leaves it to the harness, which is built only after an installation.
    if options.args.iter().any(|arg| arg == "--help" || arg == "-h") {
        Options::augment_args(Cli::new("cargo xtask parity")).print_help()?;
        return Ok(ExitCode::SUCCESS);
    }
    if let [first, args @ ..] = options.args.as_slice()
        && first == "recipes"
    {
        return Ok(workspace::exit_code(workspace::status(recipes(ws)?.args(args))?));
    }
    Ok(workspace::exit_code(workspace::status(command(ws)?.args(&options.args))?))
}

/// Runs every case; returns the exit status and the harness's line with the totals.
pub fn all(ws: &Workspace) -> Result<(ExitStatus, String)> {
    totals(&mut command(ws)?)
}

/// The same of every recipe.
pub fn all_recipes(ws: &Workspace) -> Result<(ExitStatus, String)> {
    totals(&mut recipes(ws)?)
}

fn totals(command: &mut Command) -> Result<(ExitStatus, String)> {
    let mut totals = String::new();
    let status = workspace::tee(command, |line| {
        if line.contains(" passed, ") {
            totals = line.to_owned();
        }
    })?;
    Ok((status, totals))
}

/// Built as `cargo xtask test` builds it.
fn command(ws: &Workspace) -> Result<Command> {
    let libtorch = setup::for_parity(ws)?;
    let programs = artifacts::build(ws, &["build", "--workspace", "--bin", "overdrive-parity"])?;
    let parity = programs.first().context("cargo has built no program")?;
    let mut command = ws.command(ws.join(".cargo/with-libtorch"));
    // In the user's current folder, because its options may be relative paths.
    command.arg(&parity.path).current_dir(std::env::current_dir()?).env("LIBTORCH", &libtorch.dir);
    command.env("OVERDRIVE_PYTHON", python::with_torch(ws, &libtorch)?);
    Ok(command)
}

/// The comparison of recipes, whose programs are examples.
fn recipes(ws: &Workspace) -> Result<Command> {
    let mut command = command(ws)?;
    let programs = artifacts::build(ws, &["build", "--workspace", "--examples", "--bins"])?;
    let recipe = programs.iter().find(|program| program.name == "recipe_mnist").context("no recipe was built")?;
    command.arg("--recipes").arg(recipe.path.parent().context("a program is in a folder")?);
    Ok(command)
}
