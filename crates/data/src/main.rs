//! Converts training data between formats; see `overdrive-data convert --help`.
#![forbid(unsafe_code)]

mod cli;
mod convert;
mod example;
mod format;
mod names;
mod reencode;
mod sample;
mod source;
mod target;

use std::process::ExitCode;

use clap::Parser;

use crate::cli::{Cli, Command};
use crate::convert::Interrupted;

fn main() -> ExitCode {
    let Command::Convert(options) = Cli::parse().command;
    match convert::run(&options) {
        Ok(summary) => {
            println!("{summary}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("error: {error:#}");
            // The exit status with which shells report Ctrl-C.
            if error.is::<Interrupted>() { ExitCode::from(130) } else { ExitCode::FAILURE }
        }
    }
}
