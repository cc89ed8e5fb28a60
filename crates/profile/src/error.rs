//! What can go wrong with a profile.

use std::io;
use std::path::{Path, PathBuf};

use overdrive_core::TorchError;

/// Why something could not be profiled, or a profile not written.
///
/// Every message is complete in itself, so that printing the error alone is enough.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// A profiler was started a second time.
    #[error("the profiler has been started already: stop it before it is started again")]
    AlreadyStarted,

    /// A profiler was stepped or stopped that is not on.
    #[error("the profiler is not on: start it first; stopping it twice is once too often")]
    NotStarted,

    /// libtorch has room for one profiler a process.
    #[error("another profiler is on in this process: stop or drop it first")]
    Busy,

    /// Nothing is left to record.
    #[error("nothing to record: {0}")]
    NothingToRecord(&'static str),

    /// A schedule that cannot be followed.
    #[error("schedule: {0}")]
    Schedule(String),

    /// A setting, or a figure from elsewhere, that makes no sense.
    #[error("{name} = {value}: {problem}")]
    Setting {
        /// What was set.
        name: &'static str,
        /// To what.
        value: String,
        /// What it should be.
        problem: String,
    },

    /// Metadata that would spoil the trace.
    #[error("metadata {key:?}: {value}: {problem}")]
    Metadata {
        /// The key.
        key: String,
        /// What was to stand there.
        value: String,
        /// What is wrong with it.
        problem: String,
    },

    /// A table was to be sorted by something unknown.
    #[error("{0:?} is nothing to sort by: there are {names}", names = known_sort_keys())]
    UnknownSortKey(String),

    /// The operating system refused.
    #[error("{}: cannot {action}: {error}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was to be done with it.
        action: &'static str,
        /// What the operating system said.
        error: io::Error,
    },

    /// A GPU, or all of them, did not answer.
    #[error("{0}")]
    Gpu(String),

    /// Metrics cannot be served there.
    #[error("cannot serve metrics at {address}: {error}; take another port, or 0 for a free one")]
    Listen {
        /// Where.
        address: std::net::SocketAddr,
        /// What the operating system said.
        error: io::Error,
    },

    /// The operating system has no thread left.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),

    /// The trace was cut short when it was written: a full disk, say. Its events are still there.
    #[error("{}: the trace is incomplete: is the disk full? It cannot be written a second time", path.display())]
    Incomplete {
        /// The file.
        path: PathBuf,
    },

    /// libtorch refused.
    #[error(transparent)]
    Torch(#[from] TorchError),
}

fn known_sort_keys() -> String {
    crate::SortBy::ALL.map(|(name, _)| name).join(", ")
}

/// Names the file that an operation was about.
pub(crate) trait When<T> {
    fn when(self, action: &'static str, path: &Path) -> Result<T, ProfileError>;
}

impl<T> When<T> for io::Result<T> {
    fn when(self, action: &'static str, path: &Path) -> Result<T, ProfileError> {
        self.map_err(|error| ProfileError::Io { path: path.to_owned(), action, error })
    }
}
