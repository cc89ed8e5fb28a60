//! Checks a host before its ranks train; see `overdrive-node-check --help`.
#![forbid(unsafe_code)]

use std::process::ExitCode;
use std::time::Duration;

use clap::{Parser, ValueEnum};
use overdrive_ddp::{Backend, DdpError, InitMethod, NodeCheckOptions, ProcessGroup, check_node, nccl_is_compiled};
use tch::Cuda;

/// Checks a host's devices and the connections between its ranks
///
/// A launcher starts it as each of the host's ranks: `overdrive-run --node-check overdrive-node-check ..`. Each rank
/// writes patterns to its device's memory and reads them, multiplies matrices whose product is known, and sums with the
/// others. The exit code is 1 if something is wrong, and the last line says what.
#[derive(Parser)]
#[command(name = "overdrive-node-check", version, max_term_width = 100)]
struct Cli {
    /// What the ranks will train with; auto: nccl where there are GPUs, else gloo
    #[arg(long, value_enum, default_value = "auto")]
    backend: Choice,
    /// Memory that each rank writes and reads, in MiB
    #[arg(long, default_value_t = NodeCheckOptions::default().memory_mib)]
    memory_mib: usize,
    /// How long each rank multiplies matrices, in seconds
    #[arg(long, default_value_t = NodeCheckOptions::default().compute.as_secs_f64())]
    seconds: f64,
    /// The fewest GFLOP/s in products of matrices of float32
    #[arg(long, default_value_t = 0.0)]
    least_gflops: f64,
    /// The fewest MB/s of an all-reduce of 4 MiB, by its tensor
    #[arg(long, default_value_t = 0.0)]
    least_mb_per_second: f64,
    /// How long ranks wait for each other, in seconds
    #[arg(long, default_value_t = 60.0)]
    timeout: f64,
}

#[derive(Clone, Copy, ValueEnum)]
enum Choice {
    Auto,
    Gloo,
    Nccl,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let (Ok(compute), Ok(timeout)) =
        (Duration::try_from_secs_f64(cli.seconds), Duration::try_from_secs_f64(cli.timeout))
    else {
        eprintln!("overdrive-node-check: --seconds and --timeout are numbers of seconds, 0 or more");
        return ExitCode::from(2);
    };
    let options = NodeCheckOptions {
        memory_mib: cli.memory_mib,
        compute,
        least_gflops: cli.least_gflops,
        least_mb_per_second: cli.least_mb_per_second,
        ..Default::default()
    };
    match check(cli.backend, timeout, &options) {
        Ok(line) => {
            println!("{line}");
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("overdrive-node-check: {error}");
            ExitCode::FAILURE
        }
    }
}

fn check(backend: Choice, timeout: Duration, options: &NodeCheckOptions) -> Result<String, DdpError> {
    let backend = match backend {
        Choice::Gloo => Backend::Gloo,
        Choice::Nccl => Backend::Nccl,
        Choice::Auto if nccl_is_compiled() && Cuda::is_available() => Backend::Nccl,
        Choice::Auto => Backend::Gloo,
    };
    let group = ProcessGroup::builder(backend).timeout(timeout).init(&InitMethod::Auto)?;
    let report = check_node(&group, options)?;
    group.close()?;
    Ok(format!(
        "{:?}: {} MiB of memory, {:.1} GFLOP/s, {:.0} MB/s between {} ranks over {backend:?}",
        group.device(),
        options.memory_mib,
        report.gflops,
        report.mb_per_second,
        group.size()
    ))
}
