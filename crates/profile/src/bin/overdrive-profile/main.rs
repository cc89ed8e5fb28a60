//! Records training runs and reports what they wait for; see `overdrive-profile --help`.
#![forbid(unsafe_code)]

mod child;
mod cli;
mod diff;
mod folder;
mod hosts;
mod records;
mod run;
mod show;

use std::io::{self, ErrorKind, Write as _};
use std::process::ExitCode;

use clap::Parser as _;

use crate::cli::{Cli, Command};

fn main() -> ExitCode {
    let done = match Cli::parse().command {
        Command::Run(options) => run::run(&options),
        Command::Show(options) => show::show(&options),
        Command::Diff(options) => diff::diff(&options),
    };
    match done {
        Ok(code) => code,
        Err(error) => {
            eprintln!("overdrive-profile: {error:#}");
            ExitCode::FAILURE
        }
    }
}

/// Writes to standard output; a closed pipe is not an error.
fn say(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    match writeln!(out, "{}", text.trim_end()).and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        done => done,
    }
}
