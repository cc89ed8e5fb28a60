//! The folder of a run: a single process has its checkpoints in it, and each rank in a folder of its own there. A run may
//! have been both, with any numbers of ranks, one after another.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{CheckpointError, Context};
use crate::first;
use crate::folder::Folder;
use crate::manifest::{Manifest, Metric, Rank};
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

    /// An error where one of those whose checkpoints after this step are to be set aside is still there.
    pub fn check_others_ended(&self, step: u64) -> Result<(), CheckpointError> {
        for folder in self.others()? {
            if folder.steps()?.last().is_some_and(|&last| last > step) {
                folder.check_unused()?;
            }
        }
        Ok(())
    }

    /// Whether there is a note that this step, of which some rank has a checkpoint, was never completed: a note of one of
    /// the ranks that were saving it then. `own`: this rank, whose note alone counts where it sees no such checkpoint.
    ///
    /// In doubt it is false: a note may be left from another attempt.
    pub fn was_never_complete(&self, step: u64, own: Option<Rank>) -> Result<bool, CheckpointError> {
        if Folder::reading(&self.root).has(step)? {
            return Ok(false);
        }
        let ranks = ranks_in(&self.root)?;
        let mut saved = None;
        for &rank in &ranks {
            let folder = self.of_rank(rank);
            if !folder.has(step)? {
                continue;
            }
            let mark = match Manifest::of_step(&folder.step(step), step) {
                Ok(manifest) => manifest.ranks.filter(|mark| mark.rank == rank),
                Err(error) if error.is_damage() => None,
                Err(error) => return Err(error),
            };
            match mark {
                Some(mark) if saved.is_none_or(|saved| saved == mark.world_size) => saved = Some(mark.world_size),
                _ => return Ok(false),
            }
        }
        let is_noted = |rank, world_size| first::is_begun(&self.of_rank(rank), step, world_size);
        let Some(world_size) = saved else { return own.map_or(Ok(false), |own| is_noted(own.rank, own.world_size)) };
        for rank in ranks.into_iter().filter(|&rank| rank < world_size) {
            if is_noted(rank, world_size)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Removes the notes of ranks that their first checkpoint is not complete: all ranks have a step. Returns what could
    /// not be removed.
    pub fn remove_notes(&self) -> Vec<CheckpointError> {
        match ranks_in(&self.root) {
            Ok(ranks) => ranks.iter().filter_map(|&rank| first::end(self.of_rank(rank).root()).err()).collect(),
            Err(error) => vec![error],
        }
    }

    /// The metric of a step's checkpoint, which all ranks have saved alike; none where a manifest is damaged, and where
    /// not each of the ranks that have saved it still has it.
    pub fn metric(&self, own: &Folder, mark: Option<Rank>, step: u64) -> Result<Option<Metric>, CheckpointError> {
        let read = |folder: &Folder| match Manifest::of_step(&folder.step(step), step) {
            Ok(manifest) => Ok(Some(manifest)),
            Err(error @ CheckpointError::Io { .. }) => Err(error),
            Err(_) => Ok(None),
        };
        let alone = Folder::reading(&self.root);
        if alone.has(step)? {
            return Ok(read(&alone)?.and_then(|manifest| manifest.metric));
        }
        // The ranks that are here now keep and remove the same.
        let is_of_now = |found: &Manifest| mark.is_some_and(|mark| found.ranks.is_some_and(|found| found.is(&mark)));
        if let Some(manifest) = read(own)?.filter(is_of_now) {
            return Ok(manifest.metric);
        }
        let Some(manifest) = read(&self.of_rank(0))? else { return Ok(None) };
        for rank in 1..manifest.ranks.map_or(1, |mark| mark.world_size) {
            if !self.of_rank(rank).has(step)? {
                return Ok(None);
            }
        }
        Ok(manifest.metric)
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
