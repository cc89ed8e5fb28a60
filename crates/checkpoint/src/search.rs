//! The search for the checkpoint to resume: the newest that all ranks have undamaged, whoever has saved it.

use std::cell::OnceCell;
use std::collections::BTreeMap;
use std::path::PathBuf;

use overdrive_core::{Shard, Stateful};

use crate::checkpoint::Checkpoint;
use crate::error::CheckpointError;
use crate::folder::Folder;
use crate::load::{check_all_parts, names};
use crate::manifest::Manifest;
use crate::ranks::Verdict;
use crate::read::{Saved, read_entries, read_parts};
use crate::together::Together;

/// The parts to load, which say what they need.
pub(crate) struct Wanted<'a> {
    parts: Vec<(&'a str, &'a dyn Stateful)>,
    shards: OnceCell<BTreeMap<&'a str, Option<Shard>>>,
}

/// Newer checkpoints than the one that was found.
#[derive(Default)]
pub(crate) struct Passed {
    /// The step that was found after them.
    found: Option<u64>,
    /// Why they could not be used.
    pub skipped: Vec<CheckpointError>,
    /// The steps whose checkpoint in this process's folder is damaged.
    pub damaged: Vec<u64>,
}

impl<'a> Wanted<'a> {
    pub fn of(parts: &'a [(&str, &mut dyn Stateful)]) -> Self {
        let shared = |(name, part): &'a (&str, &mut dyn Stateful)| (*name, &**part as &dyn Stateful);
        Self { parts: parts.iter().map(shared).collect(), shards: OnceCell::new() }
    }

    /// Which shards of whole states the parts have now.
    fn shards(&self) -> Result<&BTreeMap<&'a str, Option<Shard>>, CheckpointError> {
        if let Some(known) = self.shards.get() {
            return Ok(known);
        }
        let mut shards = BTreeMap::new();
        for (name, part) in &self.parts {
            let state = part.state_dict();
            let state = state.map_err(|error| CheckpointError::Part { part: (*name).to_owned(), error })?;
            shards.insert(*name, state.shard());
        }
        Ok(self.shards.get_or_init(|| shards))
    }

    /// Whether this part was saved as the shard that it is now.
    fn fits(&self, saved: &Manifest, name: &str) -> Result<bool, CheckpointError> {
        let now = self.shards()?.get(name).copied().flatten();
        Ok(saved.parts.get(name).is_none_or(|part| part.ranks.shard() == now))
    }

    /// Whether all parts were.
    fn all_fit(&self, saved: &Manifest) -> Result<bool, CheckpointError> {
        // Without shards, the states are not asked for, except by ranks.
        if saved.ranks.is_none() && !saved.has_shards() {
            return Ok(true);
        }
        for (name, _) in &self.parts {
            if !self.fits(saved, name)? {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

impl Checkpoint {
    /// The newest checkpoint that all ranks have undamaged, and those that were passed over.
    pub(crate) fn newest(&mut self, wanted: Option<&Wanted<'_>>) -> Result<Option<(Saved, Passed)>, CheckpointError> {
        self.wait()?;
        let mut passed = self.passed.take().unwrap_or_default();
        let mut steps = self.ranks.all("list its checkpoints", self.run.steps(&self.folder))?;
        steps.retain(|&step| passed.found.is_none_or(|found| step <= found));
        match self.search(&steps, wanted, &mut passed)? {
            Some(saved) => {
                self.check_together(&saved)?;
                passed.found = Some(saved.step);
                Ok(Some((saved, passed)))
            }
            None => self.nothing_found(&steps, passed.skipped.into_iter().next()).map(|()| None),
        }
    }

    /// Refuses checkpoints of several runs.
    pub(crate) fn check_together(&self, saved: &Saved) -> Result<(), CheckpointError> {
        let own = i64::try_from(saved.together).unwrap_or(i64::MAX);
        match self.ranks.min(own)? == self.ranks.max(own)? {
            true => Ok(()),
            false => Err(CheckpointError::OtherRun { folder: self.folder.root().to_path_buf(), step: saved.step }),
        }
    }

    fn search(
        &self,
        steps: &[u64],
        wanted: Option<&Wanted<'_>>,
        passed: &mut Passed,
    ) -> Result<Option<Saved>, CheckpointError> {
        let mut left = steps;
        loop {
            let own = left.last().map_or(-1, |&step| step as i64);
            let (lowest, highest) = (self.ranks.min(own)?, self.ranks.max(own)?);
            let Ok(step) = u64::try_from(lowest) else { return Ok(None) };
            if lowest < highest {
                left = &left[..left.partition_point(|&own| own <= step)];
                continue;
            }
            let saved = self.read(step, wanted);
            match (self.ranks.worst(Verdict::of(&saved))?, saved) {
                (Verdict::Good, Ok(saved)) => return Ok(Some(saved)),
                (Verdict::Damaged, saved) => {
                    let error = saved.err().unwrap_or_else(|| self.other(step));
                    if self.is_of_own(&error, step) {
                        passed.damaged.push(step);
                    }
                    tracing::warn!("{error}; trying the previous checkpoint");
                    passed.skipped.push(error);
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

    /// Whether it is the checkpoint in this process's folder that is damaged.
    fn is_of_own(&self, error: &CheckpointError, step: u64) -> bool {
        let own = self.folder.step(step);
        matches!(error, CheckpointError::Damaged { path, .. } if path.starts_with(&own)) && own.exists()
    }

    /// Reads what this rank needs of a step; without parts, only the fields, but what is read is compared with its
    /// checksums all the same.
    pub(crate) fn read(&self, step: u64, wanted: Option<&Wanted<'_>>) -> Result<Saved, CheckpointError> {
        if let Some((folder, own)) = self.own(step, wanted)? {
            return read_parts(&folder, own, |_| true);
        }
        let all = Together::open(self.run.root(), step, &self.from_rank_0)?;
        let first = all.first();
        let own = all.own(self.ranks.mark(), self.ranks.rank());
        let there = match own {
            Some(_) => first.parts.keys().cloned().collect(),
            None => all.parts(&self.begin_anew)?,
        };
        let left_out = first.parts.keys().filter(|&name| !there.contains(name)).cloned().collect();
        let mut states = BTreeMap::new();
        match wanted {
            Some(wanted) => {
                let asked = wanted.parts.iter().map(|(name, _)| *name);
                check_all_parts(&all.folder, &names(&first.parts), asked)?;
                for (name, part) in wanted.parts.iter().filter(|(name, _)| there.contains(*name)) {
                    let own = match own {
                        Some((folder, own)) if wanted.fits(own, name)? => Some(folder).zip(own.parts.get(*name)),
                        _ => None,
                    };
                    let state = match own {
                        Some((folder, own)) => read_entries(folder, name, own.clone(), None)?,
                        None => all.read(name, *part)?,
                    };
                    states.insert((*name).to_owned(), state);
                }
            }
            None => all.verify(&there, self.ranks.rank(), self.ranks.size())?,
        }
        let (folder, manifest) = own.unwrap_or((&all.folder, first));
        let (folder, fields) = (folder.to_path_buf(), manifest.fields.clone());
        Ok(Saved { folder, step, together: first.together(), left_out, parts: states, fields })
    }

    /// This process's own checkpoint of a step, if it has all that the parts need.
    fn own(&self, step: u64, wanted: Option<&Wanted<'_>>) -> Result<Option<(PathBuf, Manifest)>, CheckpointError> {
        let (folder, mark) = (self.folder.step(step), self.ranks.mark());
        // Of one step, the checkpoint of a single process counts.
        if mark.is_some() && Folder::reading(self.run.root()).step(step).exists() {
            return Ok(None);
        }
        // One that cannot be read is reported where the checkpoints of all ranks are opened, if there is no other.
        let Ok(own) = Manifest::of_step(&folder, step) else { return Ok(None) };
        let is_ours = mark.is_none_or(|mark| own.ranks.is_some_and(|found| found.is(&mark)));
        let fits = is_ours && wanted.map_or(Ok(true), |wanted| wanted.all_fit(&own))?;
        Ok(fits.then_some((folder, own)))
    }

    /// Returns if there never was a checkpoint; else an error, because a run must not start over silently. `steps`: those of
    /// which this process sees some checkpoint.
    fn nothing_found(&self, steps: &[u64], skipped: Option<CheckpointError>) -> Result<(), CheckpointError> {
        // -1 where no rank has seen any.
        let newest = self.ranks.max(steps.last().map_or(-1, |&step| step as i64))?;
        let nothing = || {
            let (folder, found) = (self.folder.root().to_path_buf(), steps.to_vec());
            Err(CheckpointError::NoCommonStep { folder, found })
        };
        // A rank may have been ended while the very first checkpoint was written: then others have one, and it has a note.
        let is_only = steps.iter().all(|&step| step as i64 == newest);
        let never_complete = match u64::try_from(newest) {
            Ok(newest) if is_only => self.run.was_never_complete(newest),
            _ => Ok(false),
        };
        let own = match (never_complete, skipped) {
            (Err(error), _) => Err(error),
            (Ok(true), _) => Ok(()),
            (_, Some(error)) => Err(error),
            _ if newest < 0 => Ok(()),
            // The ranks that lack it, each on a disk of its own, say whether it was complete.
            _ if matches!(*steps, [step] if self.folder.step(step).exists()) => Ok(()),
            _ => nothing(),
        };
        self.ranks.all("find a step that all ranks have", own)
    }
}
