//! What a worker's thread does before its first batch.

use std::sync::Arc;

use crate::DataError;
use crate::loader::guard::survived;

/// A function that each worker calls with its number before its first batch.
pub(crate) type WorkerInit = Arc<dyn Fn(usize) -> Result<(), DataError> + Send + Sync>;

/// Prepares the calling thread, and calls the user's `worker_init_fn`, if there is one.
pub(crate) fn begin(worker: usize, nice: i32, init: Option<&WorkerInit>) -> Result<(), DataError> {
    lower_priority(nice);
    // No worker starts a thread pool of libtorch's.
    if let Err(error) = overdrive_ffi::context::use_one_thread() {
        tracing::debug!(%error, "libtorch may use several threads in a worker");
    }
    let Some(init) = init else { return Ok(()) };
    let panicked = |message| DataError::other(format!("it panicked: {message}"));
    let outcome = survived(|| init(worker)).unwrap_or_else(|message| Err(panicked(message)));
    outcome.map_err(|error| DataError::WorkerInit { worker, error: Box::new(error) })
}

/// Lowers the calling thread's priority; on Linux each thread has its own.
#[cfg(target_os = "linux")]
fn lower_priority(nice: i32) {
    if nice != 0 {
        let thread = rustix::thread::gettid();
        // Fails where a sandbox forbids it: the worker then keeps its priority.
        if let Err(error) = rustix::process::setpriority_process(Some(thread), nice) {
            tracing::debug!(%error, "the worker keeps its priority");
        }
    }
}

#[cfg(not(target_os = "linux"))]
fn lower_priority(_nice: i32) {}
