//! Runs the comparisons with other tools. `cargo xtask versus` builds and starts this program.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use overdrive_benches::planted;
use overdrive_benches::versus::{Options, run};

fn main() -> ExitCode {
    // `versus profile` starts this program again for each training loop. Such a process runs only that loop.
    let result = planted::main_if_told().unwrap_or_else(|| run(&Options::parse()));
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
