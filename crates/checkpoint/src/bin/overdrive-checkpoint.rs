//! Checkpoints for other programs; see `overdrive-checkpoint --help`.
#![forbid(unsafe_code)]

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use overdrive_checkpoint::{consolidate, consolidate_from_rank_0};

/// Works on the checkpoints of a run.
#[derive(Parser)]
#[command(name = "overdrive-checkpoint", version, max_term_width = 100)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Write one part of a checkpoint, which several ranks may have saved together, as one safetensors file
    Consolidate {
        /// The run's folder, in which the ranks' folders are
        folder: PathBuf,
        /// The file to write
        file: PathBuf,
        /// The part's name
        #[arg(long, default_value = "model")]
        part: String,
        /// The step; by default the newest that all ranks have
        #[arg(long)]
        step: Option<u64>,
        /// Take rank 0's where ranks have different states that are no shards, such as running statistics
        #[arg(long)]
        from_rank_0: bool,
    },
}

fn main() -> ExitCode {
    let Command::Consolidate { folder, file, part, step, from_rank_0 } = Cli::parse().command;
    let written = match from_rank_0 {
        true => consolidate_from_rank_0(&folder, step, &part, &file),
        false => consolidate(&folder, step, &part, &file),
    };
    match written {
        Ok(step) => {
            println!("{}: the part {part:?} of step {step}", file.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("overdrive-checkpoint: {error}");
            ExitCode::FAILURE
        }
    }
}
