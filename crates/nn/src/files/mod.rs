//! Files of state dicts.

mod pt;
mod safetensors;
mod shards;
mod write;

use std::path::{Path, PathBuf};

use overdrive_core::TorchError;

pub use self::pt::{load_dcp, load_pt};
pub use self::safetensors::save_safetensors;
pub use self::shards::{load_safetensors, save_sharded};

/// Why a file of weights cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The system refuses.
    #[error("cannot {action} {}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is cut off, or has another format.
    #[error("{} is damaged or has another format: {what}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        what: String,
    },
    /// The file holds something that cannot be loaded. Loading it in Python may run code.
    #[error("{} holds {what}, which is neither a tensor nor a plain container: save `model.state_dict()`", path.display())]
    Refused {
        /// The file.
        path: PathBuf,
        /// What it holds: a class or a function by its name, for instance.
        what: String,
    },
    /// The state has an entry that the file cannot hold.
    #[error("{}: `{key}`: expected {expected}, found {found}", path.display())]
    Unsupported {
        /// The file.
        path: PathBuf,
        /// The entry.
        key: String,
        /// What would be right.
        expected: &'static str,
        /// What was found.
        found: String,
    },
    /// libtorch failed.
    #[error(transparent)]
    Torch(#[from] TorchError),
}

impl FileError {
    fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Self {
        move |source| Self::Io { action, path: path.to_owned(), source }
    }
}

/// What is wrong with a file's content, before its path is known.
#[derive(Debug)]
enum Bad {
    Damaged(String),
    Refused(String),
    Torch(TorchError),
}

impl Bad {
    fn at(self, path: &Path) -> FileError {
        let path = path.to_owned();
        match self {
            Self::Damaged(what) => FileError::Damaged { path, what },
            Self::Refused(what) => FileError::Refused { path, what },
            Self::Torch(error) => FileError::Torch(error),
        }
    }
}
