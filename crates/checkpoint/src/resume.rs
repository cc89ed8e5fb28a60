//! Resuming where a run stopped: all ranks at the same step.

use std::collections::BTreeSet;
use std::path::PathBuf;

use overdrive_core::Stateful;

use crate::checkpoint::Checkpoint;
use crate::error::CheckpointError;
use crate::load::{check_all_parts, load_all, names};
use crate::read::Saved;
use crate::search::{Passed, Wanted};

/// The checkpoint that [`Checkpoint::resume`] has loaded.
#[derive(Debug)]
#[non_exhaustive]
pub struct Resumed {
    /// The step that it was saved at.
    pub step: u64,
    /// The checkpoint's folder.
    pub folder: PathBuf,
    /// Why newer checkpoints could not be used. One that is damaged in this process's own folder has been renamed to
    /// `damaged-step-N`; those that others have saved stay, and the next save sets them aside.
    pub skipped: Vec<CheckpointError>,
    /// Parts that were not loaded, because another number of ranks has saved them
    /// ([`begin_anew`](crate::CheckpointBuilder::begin_anew)).
    pub left_out: Vec<String>,
}

/// The parts but some.
fn but<'a>(
    parts: &'a mut [(&str, &mut dyn Stateful)],
    left_out: &BTreeSet<String>,
) -> Vec<(&'a str, &'a mut dyn Stateful)> {
    let mut rest = Vec::new();
    for (name, part) in parts {
        if !left_out.contains(*name) {
            let part: &mut dyn Stateful = &mut **part;
            rest.push((&**name, part));
        }
    }
    rest
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
    /// Where each rank has saved its own ([`Writers::Each`](crate::Writers::Each)), another number of ranks can resume, and
    /// parts can be sharded in another way: each rank reads the rows that it needs from the folders of all ranks.
    ///
    /// # Errors
    /// When the checkpoint does not fit the parts or has a newer format, when every checkpoint is damaged, and when
    /// ranks have several checkpoints, but no step in common; [`OtherRun`](CheckpointError::OtherRun) and
    /// [`OtherRanks`](CheckpointError::OtherRanks).
    ///
    /// # Syncs
    /// As the parts' `load_state_dict` do. Waits for all ranks.
    pub fn resume(&mut self, parts: &mut [(&str, &mut dyn Stateful)]) -> Result<Option<Resumed>, CheckpointError> {
        let Some((saved, Passed { skipped, damaged, .. })) = self.newest(Some(&Wanted::of(parts)))? else {
            return Ok(None);
        };
        let (step, folder) = (saved.step, saved.folder.clone());
        let left_out = saved.left_out.iter().cloned().collect();
        self.load_everywhere(saved, parts)?;
        let set_aside = self.set_aside(step, &damaged);
        self.ranks.all("set later checkpoints aside", set_aside)?;
        Ok(Some(Resumed { step, folder, skipped, left_out }))
    }

    /// Reads only the fields, for [`get`](Self::get), of the checkpoint that [`resume`](Self::resume) would load: for a
    /// run that needs them to build its parts, with as many layers or parameter groups as before. Returns the step, which
    /// `resume` then loads too. The whole checkpoint is read, to check that it is undamaged; what other ranks have saved is
    /// read by all together.
    ///
    /// # Errors
    /// Those of [`resume`](Self::resume) that do not concern the parts.
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn read_fields(&mut self) -> Result<Option<u64>, CheckpointError> {
        let Some((saved, passed)) = self.newest(None)? else { return Ok(None) };
        (self.fields, self.passed) = (saved.fields, Some(passed));
        Ok(Some(saved.step))
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
        self.passed = None;
        let saved = self.run.steps(&self.folder).and_then(|found| match found.contains(&step) {
            true => self.read(step, Some(&Wanted::of(parts))),
            false => Err(CheckpointError::NoSuchStep { folder: self.folder.root().to_path_buf(), step, found }),
        });
        let saved = self.ranks.all(&format!("read its checkpoint of step {step}"), saved)?;
        self.check_together(&saved)?;
        self.load_everywhere(saved, parts)
    }

    /// Loads the parts on all ranks or on none.
    fn load_everywhere(
        &mut self,
        mut saved: Saved,
        parts: &mut [(&str, &mut dyn Stateful)],
    ) -> Result<(), CheckpointError> {
        let copies = self.ranks.are_several();
        let there: BTreeSet<&str> =
            names(&saved.parts).into_iter().chain(saved.left_out.iter().map(String::as_str)).collect();
        let loaded = check_all_parts(&saved.folder, &there, parts.iter().map(|(name, _)| *name));
        let parts = &mut but(parts, &saved.left_out)[..];
        let loaded = loaded.and_then(|()| load_all(&mut saved.parts, parts, copies));
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
