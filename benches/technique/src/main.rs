//! The technique benchmark; `cargo xtask bench` builds and runs it.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use overdrive_bench::job::Job;
use overdrive_bench::{JOB_ARGUMENT, contender};
use overdrive_bench_report::BenchOptions;

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let args: Vec<String> = std::env::args().collect();
    if let [_, flag, job] = &args[..]
        && flag == JOB_ARGUMENT
    {
        return contender::serve(&serde_json::from_str::<Job>(job).context("the job is not one of this program's")?);
    }
    let options = BenchOptions::parse();
    if options.check_device {
        println!("cuda: {}", tch::Cuda::is_available());
        return Ok(());
    }
    overdrive_bench::run(&options)
}
