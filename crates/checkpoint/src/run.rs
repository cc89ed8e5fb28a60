//! The folder of a run: a single process has its checkpoints in it, and each rank in a folder of its own there. A run may
//! have been both, with any numbers of ranks, one after another.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{CheckpointError, Context};
use crate::first;
use crate::folder::Folder;
use crate::manifest::{Manifest, Metric};
use crate::names::{rank_folder, rank_of};

/// The folder of a run, and who writes there now.
#[derive(Clone, Debug)]
pub(crate) struct Run {
    root: PathBuf,
    /// How many ranks write their own checkpoints; none where one process writes.
    ranks: Option<usize>,
}

impl Run {
    pub fn new(root: &Path, ranks: Option<usize>) -> Self {
        Self { root: root.to_path_buf(), ranks }
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folders in which processes of the run may have saved that are no more: ranks, if one process writes now; else a
    /// single process and ranks from a number on.
    fn others(&self) -> Result<Vec<Folder>, CheckpointError> {
        let root = self.ranks.map(|_| Folder::reading(&self.root));
        let ranks = ranks_in(&self.root)?.into_iter().filter(|&rank| Some(rank) >= self.ranks);
        Ok(root.into_iter().chain(ranks.map(|rank| self.of_rank(rank))).collect())
    }

    pub fn of_rank(&self, rank: usize) -> Folder {
        Folder::reading(&rank_folder(&self.root, rank))
    }

    /// The steps of which there may be complete checkpoints, in order; `own`: the folder of this process. Those of other
    /// ranks that write now are listed by themselves.
    pub fn steps(&self, own: &Folder) -> Result<Vec<u64>, CheckpointError> {
        let mut steps = BTreeSet::from_iter(own.steps()?);
        // Fewer ranks than now have a first one in any case.
        for folder in self.others()?.into_iter().chain([self.of_rank(0)]) {
            steps.extend(folder.steps()?);
        }
        Ok(steps.into_iter().collect())
    }

    /// Sets aside the checkpoints from step `from` on of those that are no more, because the run goes on from before them.
    /// One process of the run calls this.
    pub fn abandon_others(&self, from: u64) -> Result<(), CheckpointError> {
        for folder in self.others()? {
            if folder.steps()?.last().is_some_and(|&last| last >= from) {
                // Locks others out: should they be there after all, this is an error.
                Folder::open(folder.root())?.abandon(from, None)?;
            }
        }
        Ok(())
    }

    /// Whether there is a note that this step, of which there is a checkpoint, was never completed by all ranks.
    pub fn was_never_complete(&self, step: u64) -> Result<bool, CheckpointError> {
        for rank in ranks_in(&self.root)? {
            if first::begun(&self.of_rank(rank))? == Some(step) {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The metric of a step's checkpoint; ranks have saved the same. None where it cannot be read.
    pub fn metric(&self, own: &Folder, step: u64) -> Option<Metric> {
        let read = |folder: &Folder| Manifest::read(&folder.step(step)).ok()?.metric;
        read(own).or_else(|| self.others().ok()?.iter().chain([&self.of_rank(0)]).find_map(read))
    }
}

/// The ranks that have folders here, in order.
fn ranks_in(root: &Path) -> Result<BTreeSet<usize>, CheckpointError> {
    let entries = match fs::read_dir(root) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(BTreeSet::new()),
        entries => entries.when("list it", root)?,
    };
    let mut ranks = BTreeSet::new();
    for entry in entries {
        let entry = entry.when("list it", root)?;
        if let Some(rank) = entry.file_name().to_str().and_then(rank_of)
            && entry.path().is_dir()
        {
            ranks.insert(rank);
        }
    }
    Ok(ranks)
}
