//! Converts training data between formats; `overdrive-data convert --help` says how.
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
            // As shells report a program that Ctrl-C ended.
            if error.is::<Interrupted>() { ExitCode::from(130) } else { ExitCode::FAILURE }
        }
    }
}
