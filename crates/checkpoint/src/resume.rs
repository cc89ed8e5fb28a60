//! Resuming where a run stopped: all ranks at the same step.

use std::path::PathBuf;

use overdrive_core::Stateful;

use crate::checkpoint::Checkpoint;
use crate::error::CheckpointError;
use crate::load::{check_all_parts, load_all};
use crate::manifest::Manifest;
use crate::ranks::Verdict;
use crate::read::{Saved, read};

/// The checkpoint that [`Checkpoint::resume`] has loaded.
#[derive(Debug)]
#[non_exhaustive]
pub struct Resumed {
    /// The step that it was saved at.
    pub step: u64,
    /// The checkpoint's folder.
    pub folder: PathBuf,
    /// Why newer checkpoints could not be used; damaged ones have been renamed to `damaged-step-N`.
    pub skipped: Vec<CheckpointError>,
}

/// The newest checkpoint that all ranks have, and why no newer one could be used.
struct Search {
    found: Option<Saved>,
    skipped: Vec<CheckpointError>,
    /// The damaged steps of this rank.
    damaged: Vec<u64>,
}

impl Checkpoint {
    /// Loads the newest checkpoint into the parts, which must be exactly its parts; returns none if there is no
    /// checkpoint yet.
    ///
    /// A damaged checkpoint is skipped with a warning, and the previous one is loaded. Everything is read and its
    /// checksums compared before any part changes; if a part refuses its state, all parts keep theirs. With several
    /// ranks, this loads the newest checkpoint that all ranks have undamaged, on all ranks or on none; later ones are
    /// set aside.
    ///
    /// # Errors
    /// When the checkpoint does not fit the parts or has a newer format, when every checkpoint is damaged, and when
    /// ranks have several checkpoints, but no step in common.
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

    /// Reads only the fields, for [`get`](Self::get), of the checkpoint that [`resume`](Self::resume) would load: for a
    /// run that needs them to build its parts, with as many layers or parameter groups as before. Returns the step. The
    /// whole checkpoint is read, to check that it is undamaged.
    ///
    /// # Errors
    /// Those of [`resume`](Self::resume) that do not concern the parts.
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn read_fields(&mut self) -> Result<Option<u64>, CheckpointError> {
        let Some((saved, _)) = self.newest()? else { return Ok(None) };
        self.fields = saved.fields;
        Ok(Some(saved.step))
    }

    /// The newest checkpoint that all ranks have undamaged, and the damaged ones found on the way.
    fn newest(&mut self) -> Result<Option<(Saved, Search)>, CheckpointError> {
        self.wait()?;
        let steps = self.ranks.all("list its checkpoints", self.own_steps())?;
        let mut search = self.search(&steps)?;
        match search.found.take() {
            Some(saved) => Ok(Some((saved, search))),
            None => self.nothing_found(steps, search.skipped.drain(..).next()),
        }
    }

    /// Loads the checkpoint of a given step, as [`resume`](Self::resume) loads the newest.
    ///
    /// Checkpoints of later steps stay until the next save, and until then `resume` would load them: move them away if
    /// the run shall continue from here.
    ///
    /// # Errors
    /// [`CheckpointError::NoSuchStep`], and those of [`resume`](Self::resume); damage is an error here.
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

    /// The steps of this rank's checkpoints; an error if the newest is of another rank or number of ranks.
    fn own_steps(&self) -> Result<Vec<u64>, CheckpointError> {
        let steps = self.folder.steps()?;
        if let Some(&newest) = steps.last() {
            let folder = self.folder.step(newest);
            // A manifest that cannot be read is reported when the checkpoint is loaded.
            if let Ok(manifest) = Manifest::read(&folder) {
                self.ranks.check_mark(&folder, &manifest)?;
            }
        }
        Ok(steps)
    }

    /// The newest checkpoint that all ranks have undamaged.
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
                    tracing::warn!("{error}; trying the previous checkpoint");
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

    /// Returns none if there never was a checkpoint; else an error, because a run must not start over silently.
    fn nothing_found<T>(
        &self,
        found: Vec<u64>,
        skipped: Option<CheckpointError>,
    ) -> Result<Option<T>, CheckpointError> {
        if let Some(error) = skipped {
            return Err(error);
        }
        // A rank may have died while the very first checkpoint was written: then the other ranks have one, and it has
        // none. A rank begins its second only when all ranks have the first, so two without a common step are an error.
        let own = match found.len() {
            0 | 1 => Ok(()),
            _ => Err(CheckpointError::NoCommonStep { folder: self.folder.root().to_path_buf(), found }),
        };
        self.ranks.all("find a step that all ranks have", own)?;
        Ok(None)
    }

    /// Loads the parts on all ranks or on none.
    fn load_everywhere(
        &mut self,
        mut saved: Saved,
        parts: &mut [(&str, &mut dyn Stateful)],
    ) -> Result<(), CheckpointError> {
        let copies = self.ranks.are_several();
        let loaded = check_all_parts(&saved, parts).and_then(|()| load_all(&mut saved.parts, parts, copies));
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
        self.resumed_at(saved.step);
        self.fields = saved.fields;
        Ok(())
    }

    /// Renames damaged checkpoints and, with several ranks, later ones, so that they no longer count.
    fn set_aside(&self, step: u64, damaged: &[u64]) -> Result<(), CheckpointError> {
        if !self.ranks.writes() {
            return Ok(());
        }
        damaged.iter().try_for_each(|&step| self.folder.set_damaged_aside(step))?;
        if self.ranks.are_several() { self.folder.abandon(step + 1, None) } else { Ok(()) }
    }
}
