//! Comparisons with other tools; `cargo xtask versus` builds and runs it.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use overdrive_benches::versus::{Options, run};

fn main() -> ExitCode {
    match run(&Options::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
