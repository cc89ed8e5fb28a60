//! Going on where a run stopped: all ranks at one step.

use std::path::PathBuf;

use overdrive_core::Stateful;

use crate::checkpoint::Checkpoint;
use crate::error::CheckpointError;
use crate::load::{check_all_parts, load_all};
use crate::manifest::Manifest;
use crate::ranks::Verdict;
use crate::read::{Saved, read};

/// What [`Checkpoint::resume`] has found.
#[derive(Debug)]
#[non_exhaustive]
pub struct Resumed {
    /// The step that it was saved at.
    pub step: u64,
    /// The checkpoint's folder.
    pub folder: PathBuf,
    /// Why newer ones could not be used; those that are damaged lie beside it as `damaged-step-N` now.
    pub skipped: Vec<CheckpointError>,
}

/// What ranks have in common, and why nothing newer.
struct Search {
    found: Option<Saved>,
    skipped: Vec<CheckpointError>,
    /// Of this rank's own.
    damaged: Vec<u64>,
}

impl Checkpoint {
    /// Loads the newest checkpoint into the parts, which are to be all of its parts; none when there is none yet.
    ///
    /// A damaged one is passed over with a warning, and the one before is loaded. Everything is read and its checksums
    /// compared before any part changes; a part that refuses leaves all as they were. Among ranks, it is the newest that
    /// all of them have whole, and parts change on all ranks or on none; later ones are set aside.
    ///
    /// # Errors
    /// When what is there does not fit the parts or is of a newer format, and when every checkpoint is damaged; when
    /// ranks have several checkpoints, but none in common.
    ///
    /// # Syncs
    /// As the parts' `load_state_dict` do. Waits for all ranks.
    pub fn resume(&mut self, parts: &mut [(&str, &mut dyn Stateful)]) -> Result<Option<Resumed>, CheckpointError> {
        let Some((saved, Search { skipped, damaged, .. })) = self.newest()? else { return Ok(None) };
        let (step, folder) = (saved.step, saved.folder.clone());
        self.load_everywhere(saved, parts)?;
        let set_aside = self.set_aside(step, &damaged);
        self.ranks.all("set later checkpoints aside", set_aside)?;
        Ok(Some(Resumed { step, folder, skipped }))
    }

    /// Reads the fields of the checkpoint that [`resume`](Self::resume) would load, for [`get`](Self::get), and no part:
    /// before the parts can fit, to make as many layers or parameter groups as the run had. Returns its step. It reads that
    /// checkpoint to its end, to see whether it is whole.
    ///
    /// # Errors
    /// As [`resume`](Self::resume), but for the parts.
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn read_fields(&mut self) -> Result<Option<u64>, CheckpointError> {
        let Some((saved, _)) = self.newest()? else { return Ok(None) };
        self.fields = saved.fields;
        Ok(Some(saved.step))
    }

    /// The newest checkpoint that all ranks have whole, and what was found besides.
    fn newest(&mut self) -> Result<Option<(Saved, Search)>, CheckpointError> {
        self.wait()?;
        let steps = self.ranks.all("list its checkpoints", self.own_steps())?;
        let mut search = self.search(&steps)?;
        match search.found.take() {
            Some(saved) => Ok(Some((saved, search))),
            None => self.nothing_found(steps, search.skipped.drain(..).next()),
        }
    }

    /// Loads the checkpoint of one step, as [`resume`](Self::resume) does the newest.
    ///
    /// Those of later steps stay until the next save, and are what `resume` takes: move them away when the run is to go
    /// on from here.
    ///
    /// # Errors
    /// [`CheckpointError::NoSuchStep`], or as for [`resume`](Self::resume); damage is an error here.
    ///
    /// # Syncs
    /// As the parts' `load_state_dict` do. Waits for all ranks.
    pub fn load(&mut self, step: u64, parts: &mut [(&str, &mut dyn Stateful)]) -> Result<(), CheckpointError> {
        self.wait()?;
        let saved = self.own_steps().and_then(|found| match found.contains(&step) {
            true => read(&self.folder.step(step), Some(step)),
            false => Err(CheckpointError::NoSuchStep { folder: self.folder.root().to_path_buf(), step, found }),
        });
        let saved = self.ranks.all(&format!("read its checkpoint of step {step}"), saved)?;
        self.load_everywhere(saved, parts)
    }

    /// The steps of this rank's checkpoints, whose newest is of as many ranks.
    fn own_steps(&self) -> Result<Vec<u64>, CheckpointError> {
        let steps = self.folder.steps()?;
        if let Some(&newest) = steps.last() {
            let folder = self.folder.step(newest);
            // One that cannot be read is told of when it is to be loaded.
            if let Ok(manifest) = Manifest::read(&folder) {
                self.ranks.check_mark(&folder, &manifest)?;
            }
        }
        Ok(steps)
    }

    /// The newest checkpoint that all ranks have whole.
    fn search(&self, steps: &[u64]) -> Result<Search, CheckpointError> {
        let mut search = Search { found: None, skipped: Vec::new(), damaged: Vec::new() };
        let mut left = steps;
        loop {
            let own = left.last().map_or(-1, |&step| i64::try_from(step).unwrap_or(i64::MAX));
            let (lowest, highest) = (self.ranks.min(own)?, self.ranks.max(own)?);
            let Ok(step) = u64::try_from(lowest) else { return Ok(search) };
            if lowest < highest {
                left = &left[..left.partition_point(|&own| own <= step)];
                continue;
            }
            let saved = read(&self.folder.step(step), Some(step));
            match (self.ranks.worst(Verdict::of(&saved))?, saved) {
                (Verdict::Good, Ok(saved)) => {
                    search.found = Some(saved);
                    return Ok(search);
                }
                (Verdict::Damaged, saved) => {
                    let error = match saved {
                        Ok(_) => self.other(step),
                        Err(error) => {
                            search.damaged.push(step);
                            error
                        }
                    };
                    tracing::warn!("{error}; trying the checkpoint before");
                    search.skipped.push(error);
                    left = &left[..left.len() - 1];
                }
                (_, Err(error)) => return Err(error),
                (_, Ok(_)) => return Err(self.other(step)),
            }
        }
    }

    fn other(&self, step: u64) -> CheckpointError {
        CheckpointError::OtherRank { action: format!("read its checkpoint of step {step}") }
    }

    /// A run that starts anew in silence would be the worse surprise.
    fn nothing_found<T>(
        &self,
        found: Vec<u64>,
        skipped: Option<CheckpointError>,
    ) -> Result<Option<T>, CheckpointError> {
        if let Some(error) = skipped {
            return Err(error);
        }
        // One is the first that was ever saved, in the middle of which another rank was lost. Behind two, all had one.
        let own = match found.len() {
            0 | 1 => Ok(()),
            _ => Err(CheckpointError::NoCommonStep { folder: self.folder.root().to_path_buf(), found }),
        };
        self.ranks.all("find a step that all ranks have", own)?;
        Ok(None)
    }

    /// Loads on all ranks or on none.
    fn load_everywhere(
        &mut self,
        saved: Saved,
        parts: &mut [(&str, &mut dyn Stateful)],
    ) -> Result<(), CheckpointError> {
        let loaded = check_all_parts(&saved, parts).and_then(|()| load_all(&saved, parts, self.ranks.are_several()));
        let before = loaded.as_ref().map(drop).map_err(drop);
        match (self.ranks.any(before.is_err()), loaded) {
            (_, Err(error)) => return Err(error),
            (Ok(false), Ok(_)) => {}
            (Ok(true), Ok(before)) => {
                let action = format!("load its checkpoint of step {}", saved.step);
                return Err(before.put_back(parts, CheckpointError::OtherRank { action }));
            }
            (Err(error), Ok(before)) => return Err(before.put_back(parts, error)),
        }
        self.went_on_from(saved.step);
        self.fields = saved.fields;
        Ok(())
    }

    /// Puts damaged checkpoints and, among ranks, later ones where they do not count.
    fn set_aside(&self, step: u64, damaged: &[u64]) -> Result<(), CheckpointError> {
        if !self.ranks.writes() {
            return Ok(());
        }
        damaged.iter().try_for_each(|&step| self.folder.set_damaged_aside(step))?;
        if self.ranks.are_several() { self.folder.abandon(step + 1, None) } else { Ok(()) }
    }
}
