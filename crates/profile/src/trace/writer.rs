//! Writes a trace while training continues.

use std::path::{Path, PathBuf};
use std::thread::{Builder, JoinHandle};

use crate::ProfileError;
use crate::error::When as _;

/// The writer's `nice` value, see `setpriority(2)`.
#[cfg(target_os = "linux")]
const NICE: i32 = 10;

/// A file that a background thread writes. Dropping this waits for the thread, and logs a failure.
#[derive(Debug)]
#[must_use = "dropping it waits until the file is written"]
pub struct TraceWriter {
    path: PathBuf,
    thread: Option<JoinHandle<Result<(), ProfileError>>>,
}

impl TraceWriter {
    pub(crate) fn start(
        path: &Path,
        write: impl FnOnce(&Path) -> Result<(), ProfileError> + Send + 'static,
    ) -> Result<Self, ProfileError> {
        let target = path.to_owned();
        let thread = Builder::new().name("trace-writer".to_owned()).spawn(move || {
            lower_priority();
            write(&target)
        });
        let thread = thread.when("start a thread to write it", path)?;
        Ok(Self { path: path.to_owned(), thread: Some(thread) })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Whether the thread has finished.
    pub fn is_finished(&self) -> bool {
        self.thread.as_ref().is_none_or(JoinHandle::is_finished)
    }

    /// Waits until the file is written.
    ///
    /// # Errors
    /// The error of writing it.
    ///
    /// # Panics
    /// When the writing thread has panicked.
    pub fn wait(mut self) -> Result<(), ProfileError> {
        let Some(thread) = self.thread.take() else { return Ok(()) };
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    }
}

impl Drop for TraceWriter {
    fn drop(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        match thread.join() {
            Ok(Ok(())) => {}
            Ok(Err(error)) => tracing::error!(%error, "a trace was not written"),
            Err(_) => tracing::error!(path = %self.path.display(), "the thread that wrote a trace panicked"),
        }
    }
}

/// Gives the training thread and libtorch's pool precedence when there are fewer cores than threads.
fn lower_priority() {
    #[cfg(target_os = "linux")]
    if let Err(error) = rustix::process::setpriority_process(Some(rustix::thread::gettid()), NICE) {
        // A sandbox may forbid it; the file is written nevertheless.
        tracing::debug!(%error, "the thread that writes a trace keeps its priority");
    }
}
