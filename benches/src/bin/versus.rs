//! Comparisons with other tools; `cargo xtask versus` builds and runs it.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use clap::Parser;
use overdrive_benches::planted;
use overdrive_benches::versus::{Options, run};

fn main() -> ExitCode {
    // `profile` runs its loops in processes of their own: this program again.
    let ended = planted::main_if_told().unwrap_or_else(|| run(&Options::parse()));
    match ended {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
