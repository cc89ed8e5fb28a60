//! Packages of compiled steps for other machines; see `overdrive-compile --help`.
#![forbid(unsafe_code)]

use std::io::{self, ErrorKind, Write as _};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use overdrive_compile::{Prepared, explain, prepare};

/// Makes and explains the packages of compiled steps.
///
/// A program that uses overdrive-compile leaves the record of each step in the folder that OVERDRIVE_COMPILE_CACHE names,
/// even where there is no Python to compile it.
#[derive(Parser)]
#[command(name = "overdrive-compile", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Compile all records in a folder that have no package; takes a minute each. Copy the folder back to the machine that
    /// has no Python: its programs then find their packages. Both need the same kind of processor
    Prepare {
        /// The folder
        folder: PathBuf,
    },
    /// Show what each step in a folder is made of: what was fused, and what libtorch still runs
    Explain {
        /// The folder
        folder: PathBuf,
    },
}

fn main() -> ExitCode {
    let mut failed = 0;
    let done = match Cli::parse().command {
        Command::Prepare { folder } => {
            let mut records = 0;
            let done = prepare(&folder, |name, prepared| {
                records += 1;
                match prepared {
                    Ok(Prepared::Present) => say(&format!("{name}: has its package")),
                    Ok(_) => say(&format!("{name}: compiled")),
                    Err(error) => {
                        failed += 1;
                        eprintln!("{name}: {error}");
                    }
                }
            });
            if done.is_ok() && records == 0 {
                say(&format!("{} has no records; run the program with OVERDRIVE_COMPILE_CACHE={0}", folder.display()));
            }
            done
        }
        Command::Explain { folder } => explain(&folder).map(|text| say(text.trim_end())),
    };
    if let Err(error) = &done {
        eprintln!("overdrive-compile: {error}");
    }
    if done.is_ok() && failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Writes a line to standard output; a closed pipe ends the program quietly.
fn say(text: &str) {
    let mut out = io::stdout().lock();
    match writeln!(out, "{text}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => std::process::exit(0),
        _ => {}
    }
}
