//! What can go wrong with a checkpoint.

use std::io;
use std::path::{Path, PathBuf};

use overdrive_core::{StateError, SyncError, TorchError};

/// Why a checkpoint could not be written or loaded.
///
/// Every message is complete in itself, so that printing the error alone is enough.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum CheckpointError {
    /// The operating system refused.
    #[error("{}: cannot {action}: {error}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// What was to be done with it.
        action: String,
        /// What the operating system said: a full disk, say.
        error: io::Error,
    },

    /// A checkpoint is not what was written: cut short, with flipped bits, with a file missing.
    #[error("{}: {field}: expected {expected}, found {found}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// What of it.
        field: String,
        /// What would be right.
        expected: String,
        /// What was there.
        found: String,
    },

    /// A checkpoint of a later version.
    #[error("{}: format: expected {expected} or less, found {found}: a later version wrote it", path.display())]
    NewerFormat {
        /// The manifest.
        path: PathBuf,
        /// The latest format that this version reads.
        expected: u32,
        /// The checkpoint's.
        found: u64,
    },

    /// A part's state could not be taken, or what is saved does not fit it: another model's, say.
    #[error("{part}: {error}")]
    Part {
        /// The part's name.
        part: String,
        /// Which entry, what was expected and what was found.
        error: StateError,
    },

    /// A part of which each rank has its own, where rank 0 writes for all.
    #[error(
        "{part}: each rank has its own, and so rank 0's must not be loaded by all: save it in a checkpoint with \
         `Writers::Each`"
    )]
    OwnOfRank {
        /// The part's name.
        part: String,
    },

    /// The parts that were asked for are not those of the checkpoint.
    #[error("{}: parts: expected {expected:?}, found {found:?}", path.display())]
    Parts {
        /// The checkpoint's folder.
        path: PathBuf,
        /// Those that were asked for.
        expected: Vec<String>,
        /// Those that are there.
        found: Vec<String>,
    },

    /// A part refused after others were loaded, and one of those could then not be put back.
    #[error("{error}; and {other} could not be put back as it was: {cause}")]
    NotPutBack {
        /// Which part refused, and why; or that one of another rank did.
        error: Box<CheckpointError>,
        /// The part that holds the checkpoint's state now.
        other: String,
        /// Why it could not be put back.
        cause: Box<StateError>,
    },

    /// A name of a part that cannot be a file's, or comes twice.
    #[error("the part {name:?}: expected {expected}")]
    PartName {
        /// The name.
        name: String,
        /// What would be right.
        expected: &'static str,
    },

    /// A tensor that a safetensors file cannot hold.
    #[error("{part}: `{key}`: expected {expected}, found {found}")]
    Unsupported {
        /// The part's name.
        part: String,
        /// The entry.
        key: String,
        /// What would be right.
        expected: &'static str,
        /// What it is.
        found: String,
    },

    /// A field of your own that is no JSON, or not of the type asked for.
    #[error("the field {name:?}: {error}")]
    Field {
        /// The field's name.
        name: String,
        /// What serde said.
        error: serde_json::Error,
    },

    /// No checkpoint of this step.
    #[error("{}: no checkpoint of step {step}; there are {found:?}", folder.display())]
    NoSuchStep {
        /// The folder of checkpoints.
        folder: PathBuf,
        /// The step asked for.
        step: u64,
        /// Those that are there.
        found: Vec<u64>,
    },

    /// Another process, or another `Checkpoint` of this one, writes to the folder.
    #[error(
        "{}: another process writes its checkpoints there: give each run a folder of its own, and say `ranks` where they \
         are ranks of one run",
        folder.display()
    )]
    InUse {
        /// The folder of checkpoints.
        folder: PathBuf,
    },

    /// An option that cannot be used.
    #[error("`{option}` should be {expected}, but is {found}")]
    InvalidOption {
        /// The option's name.
        option: &'static str,
        /// What would be right.
        expected: &'static str,
        /// What it is.
        found: String,
    },

    /// The signals could not be watched.
    #[error("cannot watch for SIGTERM and Ctrl-C: {error}")]
    Signals {
        /// What the operating system said.
        error: io::Error,
    },

    /// A write in the background failed. Those before are still there.
    #[error("the checkpoint of step {step} was not written: {error}")]
    Background {
        /// Its step.
        step: u64,
        /// Why.
        error: Box<CheckpointError>,
    },

    /// An older checkpoint could not be removed: no more than a warning, because the one of this step is written.
    #[error("{error}: it takes room, and is tried again at the next save; the checkpoint of step {step} is written")]
    NotRemoved {
        /// The step that was written.
        step: u64,
        /// What could not be removed, and why.
        error: Box<CheckpointError>,
    },

    /// Something failed on another rank, whose own error says more; so this rank leaves it as well.
    #[error("another rank could not {action}; its own error says why")]
    OtherRank {
        /// What it was to do.
        action: String,
    },

    /// A checkpoint of another rank, or of a run of another size, where each rank has its own.
    #[error("{}: expected a checkpoint of {expected}, found one of {found}", path.display())]
    Rank {
        /// The checkpoint's folder.
        path: PathBuf,
        /// This rank.
        expected: String,
        /// Whose it is.
        found: String,
    },

    /// Ranks that have several checkpoints each, but none that all have: some must have lost theirs.
    #[error(
        "{}: there are {found:?}, and no step that all ranks have: bring the folders of all ranks back, or move them all \
         away to start anew",
        folder.display()
    )]
    NoCommonStep {
        /// The folder of this rank's checkpoints.
        folder: PathBuf,
        /// Those that are there.
        found: Vec<u64>,
    },

    /// A step that is not above the last one. Ranks cannot all replace a checkpoint at the same moment.
    #[error("step {step}: expected one above {last}, which is saved: ranks replace no checkpoint")]
    StepOrder {
        /// The step to save.
        step: u64,
        /// The last that was saved or loaded.
        last: u64,
    },

    /// The ranks could not talk to each other.
    #[error(transparent)]
    Sync(#[from] SyncError),

    /// libtorch failed: no memory for a snapshot, say.
    #[error(transparent)]
    Torch(#[from] TorchError),
}

impl CheckpointError {
    /// Whether the checkpoint itself is broken, so that an earlier one may serve.
    pub fn is_damage(&self) -> bool {
        matches!(self, Self::Damaged { .. })
    }

    pub(crate) fn damaged(
        path: &Path,
        field: impl Into<String>,
        expected: impl ToString,
        found: impl ToString,
    ) -> Self {
        let (expected, found) = (expected.to_string(), found.to_string());
        Self::Damaged { path: path.to_path_buf(), field: field.into(), expected, found }
    }
}

/// Says what was to be done with which file when the operating system refuses.
pub(crate) trait Context<T> {
    fn when(self, action: impl Into<String>, path: &Path) -> Result<T, CheckpointError>;
}

impl<T> Context<T> for io::Result<T> {
    fn when(self, action: impl Into<String>, path: &Path) -> Result<T, CheckpointError> {
        self.map_err(|error| CheckpointError::Io { path: path.to_path_buf(), action: action.into(), error })
    }
}
