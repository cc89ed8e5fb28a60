//! Compares speed and memory with other tools, interleaved in one run.

mod checkpoint;
mod compile;
mod ddp;
pub mod gpu_counts;
mod gpu_times;
mod host_time;
mod load;
mod loader;
mod memory;
mod optim;
mod packages;
mod peer;
mod profile;
mod shard;
mod step;
mod step_nn;
mod turns;

use std::path::{Path, PathBuf};

use anyhow::Result;
pub use overdrive_bench_report::VersusOptions as Options;
use overdrive_bench_report::write::{check_writable, write_atomically};
use overdrive_bench_report::{VersusCase, VersusReport};

/// The folder that keeps data and Python packages for the next run: in `target` if there is one, else in the folder for
/// temporary files.
fn work_folder() -> PathBuf {
    match Path::new("target").is_dir() {
        true => PathBuf::from("target/versus-data"),
        false => std::env::temp_dir().join("overdrive-versus-data"),
    }
}

/// Measures a case, prints the results, and writes them if the options say so.
///
/// # Errors
/// When an option is not for the case, measuring fails, or the results cannot be written. A missed target is not an
/// error.
pub fn run(options: &Options) -> Result<()> {
    options.check()?;
    if let Some(path) = &options.json {
        check_writable(path)?;
    }
    let mut report: VersusReport = match options.case {
        VersusCase::Step => step::measure(options)?,
        VersusCase::Optim => optim::measure(options)?,
        VersusCase::Checkpoint => checkpoint::measure(options)?,
        VersusCase::Load => load::measure(options)?,
        VersusCase::Loader => loader::measure(options)?,
        VersusCase::Ddp => ddp::measure(options)?,
        VersusCase::Profile => profile::measure(options)?,
        VersusCase::GpuCounts => return gpu_counts::run(&options.python),
        VersusCase::GpuTimes => gpu_times::measure(options)?,
        VersusCase::HostTime => host_time::measure(options)?,
        VersusCase::Compile => compile::measure(options)?,
        VersusCase::GpuCompile => compile::measure_on_gpu(options)?,
        VersusCase::Memory => memory::measure(options)?,
        VersusCase::Shard => shard::measure(options)?,
        VersusCase::CompileStart => return compile::start::serve(),
        VersusCase::MemoryDisk => return memory::disk::serve(),
        VersusCase::ShardRank => return shard::rank::serve(),
        VersusCase::DdpRank => return ddp::rank::serve(),
        VersusCase::DdpFirstSum => return ddp::launch::first_sum(),
        VersusCase::DdpMember => return ddp::members::train(),
    };
    report.pairs_asked = options.pairs;
    report.measured_at = Some(overdrive_bench_report::date::utc_now());
    print!("{}", report.table());
    if let Some(path) = &options.json {
        write_atomically(path, report.to_json()?.as_bytes())?;
        println!("results: {}", path.display());
    }
    Ok(())
}
