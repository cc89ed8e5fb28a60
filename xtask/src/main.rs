//! Overdrive's development commands: `cargo xtask` lists them. Never links libtorch, so that it builds in seconds.
#![forbid(unsafe_code)]

mod ahead;
mod artifacts;
mod bench;
mod bundle;
mod ci;
mod failures;
mod formats;
mod home;
mod libtorch;
mod matrix;
mod metadata;
mod parity;
mod pip;
mod python;
mod readme;
mod sanitize;
mod setup;
mod side_by_side;
mod source;
mod test;
mod tidy;
mod totals;
mod versus;
mod workspace;

use std::process::ExitCode;

use anyhow::Result;
use clap::Parser;

use crate::workspace::Workspace;

/// Overdrive's development commands
#[derive(Parser)]
#[command(bin_name = "cargo xtask", arg_required_else_help = true)]
enum Cli {
    Setup(setup::Options),
    Bench(bench::Options),
    Test(test::Options),
    Parity(parity::Options),
    Matrix(matrix::Options),
    Versus(versus::Options),
    Bundle(bundle::Options),
    Sanitize(sanitize::Options),
    Readme(readme::Options),
    /// Check the invariants of ARCHITECTURE.md
    Tidy,
    Ci(ci::Options),
}

fn run(cli: Cli) -> Result<ExitCode> {
    let ws = Workspace::find()?;
    match cli {
        Cli::Setup(options) => setup::run(&ws, options),
        Cli::Bench(options) => bench::run(&ws, &options),
        Cli::Test(options) => test::run(&ws, &options),
        Cli::Parity(options) => parity::run(&ws, &options),
        Cli::Matrix(options) => matrix::run(&ws, &options),
        Cli::Versus(options) => versus::run(&ws, &options),
        Cli::Bundle(options) => bundle::run(&ws, &options),
        Cli::Sanitize(options) => sanitize::run(&ws, &options),
        Cli::Readme(options) => readme::run(&ws, &options),
        Cli::Tidy => tidy::run(&ws),
        Cli::Ci(options) => ci::run(&ws, &options),
    }
}

fn main() -> ExitCode {
    run(Cli::parse()).unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
