//! What can go wrong with a profile.

use std::io;
use std::path::PathBuf;

use overdrive_core::TorchError;

/// Why something could not be profiled, or a profile not written.
///
/// Every message is complete in itself, so that printing the error alone is enough.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ProfileError {
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

    /// libtorch refused.
    #[error(transparent)]
    Torch(#[from] TorchError),
}
