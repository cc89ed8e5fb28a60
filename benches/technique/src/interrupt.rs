//! Ctrl-C and SIGTERM: says what is left of the run. The contenders get the same signal from the terminal, and end by it.

use std::io::Write;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;

use anyhow::{Context, Result};
use overdrive_bench_report::{BenchOptions, Measurements};
use signal_hook::consts::{SIGINT, SIGTERM};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

/// Watches for signals that end the program, and knows how many workloads the report has.
pub struct Interrupt {
    came: Arc<AtomicBool>,
    written: Arc<AtomicUsize>,
}

impl Interrupt {
    /// `folder` is deleted when the program is interrupted.
    ///
    /// # Errors
    /// When signals cannot be watched.
    pub fn watch(options: &BenchOptions, folder: &Path) -> Result<Self> {
        let written = Arc::new(AtomicUsize::new(0));
        let (count, report, folder) = (written.clone(), options.report.clone(), folder.to_owned());
        // Registered before the flag: a signal that sets the flag reaches the thread that ends the program.
        let mut signals = Signals::new([SIGINT, SIGTERM]).context("cannot watch for Ctrl-C")?;
        // Set within the signal's handler, so before this process can see that a contender has ended by the same signal.
        let came = Arc::new(AtomicBool::new(false));
        for signal in [SIGINT, SIGTERM] {
            flag::register(signal, came.clone()).context("cannot watch for Ctrl-C")?;
        }
        thread::spawn(move || {
            let Some(signal) = signals.forever().next() else { return };
            let left = match count.load(Ordering::Relaxed) {
                0 => "no workload was measured to its end, nothing was written".to_owned(),
                1 => format!("the workload that was measured before is in {}", report.display()),
                number => format!("the {number} workloads that were measured before are in {}", report.display()),
            };
            // `eprintln!` would panic where nobody reads any more, and the signal would be lost.
            let _ = writeln!(std::io::stderr(), "\ninterrupted: {left}");
            // It is in the folder for temporary files: an error leaves it to the system.
            let _ = std::fs::remove_dir_all(&folder);
            // Ends the program at once. `exit` would run libtorch's destructors first.
            let _ = emulate_default_handler(signal);
            // Without that handler, so that nothing waits for an end that does not come.
            std::process::exit(128 + signal);
        });
        Ok(Self { came, written })
    }

    /// Waits for the end of the program if a signal has come: contenders that it has ended are no result.
    pub fn wait_if_signalled(&self) {
        while self.came.load(Ordering::SeqCst) {
            thread::park();
        }
    }

    pub fn has_written(&self, measurements: &[Measurements]) {
        self.written.store(measurements.len(), Ordering::Relaxed);
    }
}
