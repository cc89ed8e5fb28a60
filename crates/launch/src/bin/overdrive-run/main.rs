//! Starts the ranks of a distributed run; see `overdrive-run --help`.
#![forbid(unsafe_code)]

mod cli;
mod etcd;
mod options;
mod values;

use std::process::ExitCode;

use crate::cli::Cli;

fn main() -> ExitCode {
    overdrive_launch::helper();
    let cli = Cli::read();
    match options::launch(&cli).and_then(|launch| launch.run()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("overdrive-run: {error}");
            ExitCode::from(error.exit_code())
        }
    }
}
