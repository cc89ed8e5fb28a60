//! The errors of this crate.

use std::io;
use std::path::{Path, PathBuf};

use overdrive_core::TorchError;

/// Why something could not be profiled, or a profile could not be written.
///
/// Each message includes its cause, so printing the error alone is enough.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// A profiler was started a second time.
    #[error("the profiler is on already: stop it before you start it again")]
    AlreadyStarted,

    /// A profiler that is not on was stepped, stopped or given metadata.
    #[error("the profiler is not on, or not recording: start it first, and stop it only once")]
    NotStarted,

    /// libtorch supports one profiler per process.
    #[error("another profiler is on in this process: stop or drop it first")]
    Busy,

    /// There is nothing to record.
    #[error("nothing to record: {0}")]
    NothingToRecord(&'static str),

    /// An invalid schedule.
    #[error("schedule: {0}")]
    Schedule(String),

    /// An invalid setting or input.
    #[error("{name} = {value}: {problem}")]
    Setting {
        /// The setting.
        name: &'static str,
        /// Its value.
        value: String,
        /// What is wrong with it, or what it should be.
        problem: String,
    },

    /// Metadata that would make the trace invalid.
    #[error("metadata {key:?}: {value}: {problem}")]
    Metadata {
        /// The key.
        key: String,
        /// The value.
        value: String,
        /// What is wrong with it.
        problem: String,
    },

    /// An unknown sort key of a table.
    #[error("{0:?} is not a sort key: give one of {names}", names = known_sort_keys())]
    UnknownSortKey(String),

    /// A file or folder cannot be used.
    #[error("{}: cannot {action}: {error}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was attempted.
        action: &'static str,
        /// The operating system's error.
        error: io::Error,
    },

    /// A GPU, or the driver, could not be queried.
    #[error("{0}")]
    Gpu(String),

    /// Metrics cannot be served at an address.
    #[error("cannot serve metrics at {address}: {error}; take another port, or 0 for a free one")]
    Listen {
        /// The address.
        address: std::net::SocketAddr,
        /// The operating system's error.
        error: io::Error,
    },

    /// A thread could not be started.
    #[error("cannot start a thread: {0}")]
    Thread(io::Error),

    /// The trace was cut short when it was written, for example by a full disk. The profile's events are still
    /// available.
    #[error("{}: the trace is incomplete: is the disk full? It cannot be written a second time", path.display())]
    Incomplete {
        /// The file.
        path: PathBuf,
    },

    /// libtorch failed.
    #[error(transparent)]
    Torch(#[from] TorchError),
}

fn known_sort_keys() -> String {
    crate::SortBy::ALL.map(|(name, _)| name).join(", ")
}

/// Adds the file and the attempted action to an I/O error.
pub(crate) trait When<T> {
    fn when(self, action: &'static str, path: &Path) -> Result<T, ProfileError>;
}

impl<T> When<T> for io::Result<T> {
    fn when(self, action: &'static str, path: &Path) -> Result<T, ProfileError> {
        self.map_err(|error| ProfileError::Io { path: path.to_owned(), action, error })
    }
}
