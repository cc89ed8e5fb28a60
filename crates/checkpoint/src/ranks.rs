//! Agreement between ranks, so that all save, stop and resume at the same step.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use overdrive_core::{RankGroup, SingleProcess, Stateful};

use crate::error::CheckpointError;
use crate::manifest;
use crate::names::rank_folder;

/// Which ranks write, if several train together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Writers {
    /// Rank 0 writes for all, and all load its checkpoint: for state that is the same on all ranks, in a shared folder.
    First,
    /// Each rank writes its own checkpoint, in the folder `rank-N`: for state that differs by rank (random generators,
    /// positions in the data, shards of a state). As many ranks load their own. Another number of ranks loads shards
    /// from the folders of all, each rank the rows that it needs; the folder has to be shared then.
    Each,
}

/// The ranks of a run; a single process agrees with itself at once.
#[derive(Clone)]
pub(crate) struct Ranks {
    group: Arc<dyn RankGroup>,
    writers: Option<Writers>,
}

impl Default for Ranks {
    fn default() -> Self {
        Self { group: Arc::new(SingleProcess), writers: None }
    }
}

impl fmt::Debug for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut debug = f.debug_struct("Ranks");
        debug.field("rank", &self.group.rank()).field("world_size", &self.group.world_size());
        debug.field("writers", &self.writers).finish()
    }
}

/// The outcome of reading or loading on a rank; of several ranks, the worst counts.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Verdict {
    Good,
    /// The checkpoint is damaged: an earlier one should be tried.
    Damaged,
    Failed,
}

impl Verdict {
    pub fn of<T>(result: &Result<T, CheckpointError>) -> Self {
        match result {
            Ok(_) => Self::Good,
            Err(error) if error.is_damage() => Self::Damaged,
            Err(_) => Self::Failed,
        }
    }
}

impl Ranks {
    pub fn new(group: Arc<dyn RankGroup>, writers: Writers) -> Self {
        Self { group, writers: Some(writers) }
    }

    /// Whether there is more than one rank.
    pub fn are_several(&self) -> bool {
        self.group.world_size() > 1
    }

    /// Whether this rank writes.
    pub fn writes(&self) -> bool {
        self.writers != Some(Writers::First) || self.group.rank() == 0
    }

    /// Refuses parts whose state differs by rank if rank 0 writes for all.
    pub fn check_parts<'a>(
        &self,
        parts: impl IntoIterator<Item = (&'a str, &'a dyn Stateful)>,
    ) -> Result<(), CheckpointError> {
        if !self.are_several() || self.writers != Some(Writers::First) {
            return Ok(());
        }
        match parts.into_iter().find(|(_, part)| part.differs_by_rank()) {
            Some((part, _)) => Err(CheckpointError::OwnOfRank { part: part.to_owned() }),
            None => Ok(()),
        }
    }

    /// The folder of this rank's checkpoints.
    pub fn folder(&self, root: &Path) -> PathBuf {
        match self.writers {
            Some(Writers::Each) => rank_folder(root, self.group.rank()),
            _ => root.to_path_buf(),
        }
    }

    /// The rank to record in a checkpoint; none unless each rank writes its own.
    pub fn mark(&self) -> Option<manifest::Rank> {
        let mark = manifest::Rank { rank: self.group.rank(), world_size: self.group.world_size(), together: 0 };
        (self.writers == Some(Writers::Each)).then_some(mark)
    }

    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    pub fn size(&self) -> usize {
        self.group.world_size()
    }

    /// How many ranks write their own checkpoints; none where one process writes.
    pub fn writers_of_their_own(&self) -> Option<usize> {
        (self.writers == Some(Writers::Each)).then(|| self.size())
    }

    pub fn sum(&self, value: i64) -> Result<i64, CheckpointError> {
        Ok(self.group.sum(value)?)
    }

    pub fn max(&self, value: i64) -> Result<i64, CheckpointError> {
        Ok(self.group.max(value)?)
    }

    pub fn min(&self, value: i64) -> Result<i64, CheckpointError> {
        // `!` instead of `-`, because `-i64::MIN` overflows.
        Ok(!self.group.max(!value)?)
    }

    /// Whether `yes` is true on any rank.
    pub fn any(&self, yes: bool) -> Result<bool, CheckpointError> {
        Ok(self.max(i64::from(yes))? == 1)
    }

    /// Gives all ranks the number of rank 0; `None` if it has none, or NaN.
    pub fn rank_0s(&self, value: Option<f64>) -> Result<Option<f64>, CheckpointError> {
        if !self.are_several() {
            return Ok(value.filter(|value| !value.is_nan()));
        }
        let bits = match self.group.rank() {
            0 => value.unwrap_or(f64::NAN).to_bits() as i64,
            _ => i64::MIN,
        };
        Ok(Some(f64::from_bits(self.max(bits)? as u64)).filter(|value| !value.is_nan()))
    }

    /// The worst verdict of all ranks.
    pub fn worst(&self, own: Verdict) -> Result<Verdict, CheckpointError> {
        Ok(match self.max(own as i64)? {
            0 => Verdict::Good,
            1 => Verdict::Damaged,
            _ => Verdict::Failed,
        })
    }

    /// Returns this rank's result if all ranks succeeded; else an error on every rank: a rank's own error, or
    /// [`CheckpointError::OtherRank`].
    pub fn all<T>(&self, action: &str, own: Result<T, CheckpointError>) -> Result<T, CheckpointError> {
        match (self.any(own.is_err()), own) {
            (_, Err(error)) => Err(error),
            (any_failed, Ok(value)) => match any_failed? {
                false => Ok(value),
                true => Err(CheckpointError::OtherRank { action: action.to_owned() }),
            },
        }
    }
}
