//! The errors of checkpoints.

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
        /// The action that failed.
        action: String,
        /// The operating system's error: a full disk, say.
        error: io::Error,
    },

    /// A checkpoint differs from what was written: truncated, bits flipped, or a file missing.
    #[error("{}: {field}: expected {expected}, found {found}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// The damaged field or part of the file.
        field: String,
        /// What was expected.
        expected: String,
        /// What was found.
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

    /// A part's state could not be taken, or the saved state does not fit the part: another model's, say.
    #[error("{part}: {error}")]
    Part {
        /// The part's name.
        part: String,
        /// Which entry, what was expected and what was found.
        error: StateError,
    },

    /// A part whose state differs by rank, while rank 0 writes for all.
    #[error(
        "{part}: its state differs by rank, so other ranks must not load rank 0's: save it in a checkpoint with \
         `Writers::Each`"
    )]
    OwnOfRank {
        /// The part's name.
        part: String,
    },

    /// The parts to load are not those of the checkpoint.
    #[error("{}: parts: expected {expected:?}, found {found:?}", path.display())]
    Parts {
        /// The checkpoint's folder.
        path: PathBuf,
        /// The parts to load.
        expected: Vec<String>,
        /// The checkpoint's parts.
        found: Vec<String>,
    },

    /// A part refused its state after others were loaded, and the previous state of one of those could not be restored.
    #[error("{error}; and the previous state of {other} could not be restored: {cause}")]
    NotPutBack {
        /// The part that refused, and why; or that another rank failed.
        error: Box<CheckpointError>,
        /// The part that now has the checkpoint's state.
        other: String,
        /// Why its previous state could not be restored.
        cause: Box<StateError>,
    },

    /// A part's name that cannot be a file name, or is given twice.
    #[error("the part {name:?}: expected {expected}")]
    PartName {
        /// The name.
        name: String,
        /// What was expected.
        expected: &'static str,
    },

    /// A tensor that a safetensors file cannot hold.
    #[error("{part}: `{key}`: expected {expected}, found {found}")]
    Unsupported {
        /// The part's name.
        part: String,
        /// The entry.
        key: String,
        /// What was expected.
        expected: &'static str,
        /// What was found.
        found: String,
    },

    /// A field that cannot be JSON, or is not of the type asked for.
    #[error("the field {name:?}: {error}")]
    Field {
        /// The field's name.
        name: String,
        /// serde's error.
        error: serde_json::Error,
    },

    /// No checkpoint of this step.
    #[error("{}: no checkpoint of step {step}; there are {found:?}", folder.display())]
    NoSuchStep {
        /// The folder of checkpoints.
        folder: PathBuf,
        /// The step asked for.
        step: u64,
        /// The existing steps.
        found: Vec<u64>,
    },

    /// A folder in which no run has checkpoints.
    #[error(
        "{}: {reason}; it should be the folder of a run, in which there are checkpoints, `step-N`, or those of ranks, \
         `rank-N`",
        folder.display()
    )]
    NoRun {
        /// The folder.
        folder: PathBuf,
        /// What is wrong with it.
        reason: String,
    },

    /// Another process, or another `Checkpoint` of this one, writes to the folder.
    #[error(
        "{}: another process writes its checkpoints there: use a separate folder for each run, or call `ranks` for the \
         ranks of one run",
        folder.display()
    )]
    InUse {
        /// The folder of checkpoints.
        folder: PathBuf,
    },

    /// An option outside its range.
    #[error("`{option}` should be {expected}, but is {found}")]
    InvalidOption {
        /// The option's name.
        option: &'static str,
        /// What was expected.
        expected: &'static str,
        /// The value given.
        found: String,
    },

    /// The signal handlers could not be registered.
    #[error("cannot watch for SIGTERM and Ctrl-C: {error}")]
    Signals {
        /// The operating system's error.
        error: io::Error,
    },

    /// A write in the background failed. Earlier checkpoints still exist.
    #[error("the checkpoint of step {step} was not written: {error}")]
    Background {
        /// The step that was to be written.
        step: u64,
        /// Why it failed.
        error: Box<CheckpointError>,
    },

    /// An older checkpoint could not be removed. Only a warning, because this step's checkpoint is written.
    #[error("{error}: the next save tries to remove it again; the checkpoint of step {step} is written")]
    NotRemoved {
        /// The step that was written.
        step: u64,
        /// Which checkpoint could not be removed, and why.
        error: Box<CheckpointError>,
    },

    /// The action failed on another rank, so it is an error on this one too. The other rank's own error says why.
    #[error("another rank could not {action}; its own error says why")]
    OtherRank {
        /// The action that failed.
        action: String,
    },

    /// With `Writers::Each`: the folder has the checkpoint of another rank.
    #[error("{}: expected a checkpoint of {expected}, found one of {found}", path.display())]
    Rank {
        /// The checkpoint's folder.
        path: PathBuf,
        /// The rank, and the number of ranks.
        expected: String,
        /// The checkpoint's.
        found: String,
    },

    /// With `Writers::Each`: ranks have checkpoints of one step that were not saved together, but by different runs or
    /// attempts.
    #[error(
        "{}: the ranks' checkpoints of step {step} are not of one run: give all ranks the folder of the same run, and do \
         not mix folders of several",
        folder.display()
    )]
    OtherRun {
        /// The folder of this rank's checkpoints.
        folder: PathBuf,
        /// The step.
        step: u64,
    },

    /// A part of which each rank has saved its own state, and no part of a whole one: no other number of ranks can load it.
    #[error(
        "{part}: each of {saved} ranks has saved its own state, of which there is no whole: resume with {saved} ranks, or \
         name the part in `begin_anew` of the builder"
    )]
    OtherRanks {
        /// The part's name.
        part: String,
        /// How many ranks have saved.
        saved: usize,
    },

    /// A part of which ranks have saved different states, though it does not say that they differ
    /// ([`Stateful::differs_by_rank`](overdrive_core::Stateful::differs_by_rank)); or shards that are not of one whole. Which
    /// rank's would be right for another number of ranks is unknown.
    #[error(
        "{part}: the {saved} ranks that have saved it have different states (`{entry}`), of which there is no whole: resume \
         with {saved} ranks; or name the part in `from_rank_0` of the builder, and all load rank 0's, if that is right for \
         all of them, as running statistics are; or in `begin_anew`, and it keeps the state it has"
    )]
    RanksDiffer {
        /// The part's name.
        part: String,
        /// The first entry that differs; `*` for all: there are other names or shapes.
        entry: String,
        /// How many ranks have saved.
        saved: usize,
    },

    /// Ranks have several checkpoints, but no step in common: some must have lost theirs.
    #[error(
        "{}: there are {found:?}, and no step that all ranks have: restore the folders of all ranks, or move them all \
         away to start over",
        folder.display()
    )]
    NoCommonStep {
        /// The folder of this rank's checkpoints.
        folder: PathBuf,
        /// This rank's steps.
        found: Vec<u64>,
    },

    /// A step that is not above the last one. Several ranks cannot replace a checkpoint atomically.
    #[error(
        "step {step}: expected a step above {last}, the last one: with several ranks, checkpoints cannot be replaced"
    )]
    StepOrder {
        /// The step to save.
        step: u64,
        /// The last step that was saved or loaded.
        last: u64,
    },

    /// Communication between ranks failed.
    #[error(transparent)]
    Sync(#[from] SyncError),

    /// libtorch failed: no memory for a snapshot, say.
    #[error(transparent)]
    Torch(#[from] TorchError),
}

impl CheckpointError {
    /// Whether the checkpoint itself is damaged, so that an earlier one should be tried.
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

/// Adds the action and the path to an error of the operating system.
pub(crate) trait Context<T> {
    fn when(self, action: impl Into<String>, path: &Path) -> Result<T, CheckpointError>;
}

impl<T> Context<T> for io::Result<T> {
    fn when(self, action: impl Into<String>, path: &Path) -> Result<T, CheckpointError> {
        self.map_err(|error| CheckpointError::Io { path: path.to_path_buf(), action: action.into(), error })
    }
}
