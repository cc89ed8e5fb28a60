//! Traces in a folder, under the names that TensorBoard's plug-in looks for.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use super::file::temporary;
use super::writer::TraceWriter;
use crate::error::When as _;
use crate::{Profile, ProfileError, TraceHandler};

/// Writes each profile to `<worker>.<nanoseconds>.pt.trace.json`, or `.json.gz`, in the background.
///
/// One file is written at a time: the next profile waits for it. An error of writing is returned when the next profile
/// is ready, or by [`Profiler::stop`](crate::Profiler::stop).
///
/// # Source
/// `torch.profiler.tensorboard_trace_handler`
#[derive(Debug)]
pub struct TensorBoardHandler {
    dir: PathBuf,
    worker_name: Option<String>,
    use_gzip: bool,
    writing: Option<TraceWriter>,
}

/// A [`TensorBoardHandler`] for a folder, which is created if it is missing.
pub fn tensorboard_trace_handler(dir: impl AsRef<Path>) -> TensorBoardHandler {
    TensorBoardHandler { dir: dir.as_ref().to_owned(), worker_name: None, use_gzip: false, writing: None }
}

impl TensorBoardHandler {
    /// The worker's name, which has to differ between the processes of a run; `<host>_<process ID>` unless set.
    pub fn worker_name(mut self, name: impl Into<String>) -> Self {
        self.worker_name = Some(name.into());
        self
    }

    /// Whether the files are compressed; they are not by default.
    pub fn use_gzip(mut self, compress: bool) -> Self {
        self.use_gzip = compress;
        self
    }

    fn next_file(&self) -> PathBuf {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let worker = self.worker_name.clone().unwrap_or_else(default_worker);
        let compressed = if self.use_gzip { ".gz" } else { "" };
        self.dir.join(format!("{worker}.{since}.pt.trace.json{compressed}"))
    }
}

fn default_worker() -> String {
    let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
    format!("{host}_{}", std::process::id())
}

impl TraceHandler for TensorBoardHandler {
    fn trace_ready(&mut self, profile: Arc<Profile>) -> Result<(), ProfileError> {
        let before = self.finish();
        std::fs::create_dir_all(&self.dir).when("create the folder for traces", &self.dir)?;
        let path = self.next_file();
        // Fails now, not later on the thread, if the folder cannot be written.
        drop(temporary(&path)?);
        self.writing = Some(profile.export_chrome_trace_in_background(path)?);
        before
    }

    fn finish(&mut self) -> Result<(), ProfileError> {
        self.writing.take().map_or(Ok(()), TraceWriter::wait)
    }
}
