//! A rank's sign of life, for the launcher's health check.

use std::env;
use std::fs::File;
use std::path::PathBuf;
use std::sync::{LazyLock, Mutex};
use std::time::{Duration, Instant, SystemTime};

use crate::lock::lock;

/// The variable with the file whose time of modification is the last sign of life. Set for ranks of a launcher with a health
/// check; programs in other languages touch the file.
pub const VARIABLE: &str = "OVERDRIVE_HEARTBEAT_FILE";

/// More signs within this time cost nothing.
const SPARE: Duration = Duration::from_millis(500);

/// Where signs are given, and when the last one was.
static PLACE: LazyLock<Option<(PathBuf, Mutex<Option<Instant>>)>> =
    LazyLock::new(|| env::var_os(VARIABLE).map(|file| (file.into(), Mutex::new(None))));

/// Tells the launcher that this rank goes on. Call it in each step, in evaluations too: from the first call on, a launcher
/// with [a health check](crate::Launch::health_port) is unhealthy if there is no call for longer than its
/// [`health_timeout`](crate::Launch::health_timeout), 60 seconds unless set.
///
/// Does nothing elsewhere, and at most twice a second. Of an error, such as a full disk, the launcher hears nothing.
///
/// # Source
/// torchelastic's `TORCHELASTIC_TIMER_FILE`, which its agent reads.
pub fn heartbeat() {
    let Some((file, last)) = &*PLACE else { return };
    let now = Instant::now();
    let mut last = lock(last);
    if last.is_none_or(|at| now.saturating_duration_since(at) >= SPARE) {
        *last = Some(now);
        let _ = File::options().create(true).append(true).open(file).and_then(|it| it.set_modified(SystemTime::now()));
    }
}
