//! The main job; `cargo xtask bench` builds and runs it.
#![forbid(unsafe_code)]

use std::process::ExitCode;

use anyhow::{Context, Result};
use clap::Parser;
use overdrive_bench_report::BenchOptions;
use overdrive_benches::job::Job;
use overdrive_benches::main_job;

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
        && flag == main_job::JOB_ARGUMENT
    {
        return serde_json::from_str::<Job>(job).context("the job is not one of this program's")?.run();
    }
    let options = BenchOptions::parse();
    if options.check_device {
        println!("cuda: {}", tch::Cuda::is_available());
        return Ok(());
    }
    main_job::run(&options)
}
