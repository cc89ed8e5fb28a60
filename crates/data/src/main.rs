//! Converts training data between formats, and writes the indexes of shards; see `overdrive-data --help`.
#![forbid(unsafe_code)]

mod cli;
mod convert;
mod example;
mod format;
mod index;
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
    let summary = match Cli::parse().command {
        Command::Convert(options) => convert::run(&options).map(|summary| summary.to_string()),
        Command::Index(options) => index::run(&options),
    };
    match summary {
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
