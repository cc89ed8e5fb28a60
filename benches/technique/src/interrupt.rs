//! Ctrl-C: says what is left of the run. The contenders get the same signal from the terminal, and end by it.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::{Context, Result};
use overdrive_bench_report::{BenchOptions, Measurements};

/// The exit status of a program that SIGINT ends, by the shells' convention.
const INTERRUPTED: i32 = 130;

/// Watches for Ctrl-C, and knows how many workloads the report has.
pub struct Interrupt(Arc<AtomicUsize>);

impl Interrupt {
    /// `folder` is deleted when the program is interrupted.
    ///
    /// # Errors
    /// When signals cannot be watched.
    pub fn watch(options: &BenchOptions, folder: &Path) -> Result<Self> {
        let written = Arc::new(AtomicUsize::new(0));
        let (count, report, folder) = (written.clone(), options.report.clone(), folder.to_owned());
        ctrlc::set_handler(move || {
            let left = match count.load(Ordering::Relaxed) {
                0 => "no workload was measured to its end, nothing was written".to_owned(),
                1 => format!("the workload that was measured before is in {}", report.display()),
                number => format!("the {number} workloads that were measured before are in {}", report.display()),
            };
            eprintln!("\ninterrupted: {left}");
            // It is in the folder for temporary files: an error leaves it to the system.
            let _ = std::fs::remove_dir_all(&folder);
            std::process::exit(INTERRUPTED);
        })
        .context("cannot watch for Ctrl-C")?;
        Ok(Self(written))
    }

    pub fn has_written(&self, measurements: &[Measurements]) {
        self.0.store(measurements.len(), Ordering::Relaxed);
    }
}
