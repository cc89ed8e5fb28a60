//! Resuming where a run stopped: all ranks at the same step.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use overdrive_core::{Shard, Stateful};

use crate::checkpoint::Checkpoint;
use crate::error::CheckpointError;
use crate::load::{check_all_parts, load_all, names};
use crate::manifest::Manifest;
use crate::ranks::Verdict;
use crate::read::{Saved, read, read_entries};
use crate::together::{self, Together};

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
    /// Parts that were not loaded, because another number of ranks has saved them
    /// ([`begin_anew`](crate::CheckpointBuilder::begin_anew)).
    pub left_out: Vec<String>,
}

/// The parts to load, which say what they need.
type Parts<'a> = [(&'a str, &'a dyn Stateful)];

fn shared<'a>(parts: &'a [(&str, &mut dyn Stateful)]) -> Vec<(&'a str, &'a dyn Stateful)> {
    parts.iter().map(|(name, part)| (*name, &**part as &dyn Stateful)).collect()
}

/// Which shards of whole states the parts have now.
fn shards_of<'a>(parts: &Parts<'a>) -> Result<Vec<(&'a str, Option<Shard>)>, CheckpointError> {
    let shard = |(name, part): &(&'a str, &dyn Stateful)| match part.state_dict() {
        Ok(state) => Ok((*name, state.shard())),
        Err(error) => Err(CheckpointError::Part { part: (*name).to_owned(), error }),
    };
    parts.iter().map(shard).collect()
}

/// Whether the part was saved as the shard that it is now.
fn is_parted(saved: &Manifest, name: &str, own: Option<Shard>) -> bool {
    saved.parts.get(name).is_none_or(|saved| saved.ranks.shard() == own)
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
        let Some((saved, Search { skipped, damaged, .. })) = self.newest(Some(&shared(parts)))? else {
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
    /// run that needs them to build its parts, with as many layers or parameter groups as before. Returns the step. The
    /// whole checkpoint is read, to check that it is undamaged; of other ranks only what they are.
    ///
    /// # Errors
    /// Those of [`resume`](Self::resume) that do not concern the parts.
    ///
    /// # Syncs
    /// Waits for all ranks.
    pub fn read_fields(&mut self) -> Result<Option<u64>, CheckpointError> {
        let Some((saved, _)) = self.newest(None)? else { return Ok(None) };
        self.fields = saved.fields;
        Ok(Some(saved.step))
    }

    /// The newest checkpoint that all ranks have undamaged, and the damaged ones found on the way.
    fn newest(&mut self, parts: Option<&Parts<'_>>) -> Result<Option<(Saved, Search)>, CheckpointError> {
        self.wait()?;
        let others = self.others_have_saved(parts)?;
        let steps = if others { together::steps(&self.root) } else { self.folder.steps() };
        let steps = self.ranks.all("list its checkpoints", steps)?;
        let mut search = self.search(&steps, others, parts)?;
        match search.found.take() {
            Some(saved) => {
                self.check_together(&saved)?;
                Ok(Some((saved, search)))
            }
            None => self.nothing_found(steps, others, search.skipped.drain(..).next()),
        }
    }

    /// Whether other ranks than these, or a single process, have saved checkpoints that may be newer; or these, but parted
    /// in another way.
    fn others_have_saved(&self, parts: Option<&Parts<'_>>) -> Result<bool, CheckpointError> {
        if !self.ranks.are_each() {
            return Ok(false);
        }
        let own = self.ranks.all("list its checkpoints", self.others_are_seen(parts))?;
        self.ranks.any(own)
    }

    fn others_are_seen(&self, parts: Option<&Parts<'_>>) -> Result<bool, CheckpointError> {
        let steps = self.folder.steps()?;
        // One that cannot be read is reported when the checkpoint is loaded.
        let read = |&step: &u64| Manifest::read(&self.folder.step(step)).ok();
        let saved: Vec<Manifest> = steps.iter().filter_map(read).collect();
        let is_rank = self.ranks.mark().is_some();
        if is_rank && !saved.iter().all(|saved| self.ranks.has_saved(saved)) {
            return Ok(true);
        }
        if is_rank || saved.iter().any(Manifest::has_shards) {
            let parts = shards_of(parts.unwrap_or_default())?;
            let is_own = |saved: &Manifest| parts.iter().all(|(name, own)| is_parted(saved, name, *own));
            if !saved.iter().all(is_own) {
                return Ok(true);
            }
        }
        // Those of ranks are in their folders, those of a single process are not.
        let others = if is_rank { self.root.clone() } else { together::rank_folder(&self.root, 0) };
        let is_newer = together::steps_of(&others)?.last() > steps.last();
        // Of as many ranks, some may have been ended while the first checkpoint was written.
        Ok(is_newer || (steps.is_empty() && together::has_ranks_from(&self.root, self.ranks.size())?))
    }

    /// Refuses checkpoints of several runs.
    fn check_together(&self, saved: &Saved) -> Result<(), CheckpointError> {
        let own = i64::try_from(saved.together).unwrap_or(i64::MAX);
        match self.ranks.min(own)? == self.ranks.max(own)? {
            true => Ok(()),
            false => Err(CheckpointError::OtherRun { folder: self.folder.root().to_path_buf(), step: saved.step }),
        }
    }

    /// Reads what this rank needs of a step.
    fn read(&self, step: u64, others: bool, parts: Option<&Parts<'_>>) -> Result<Saved, CheckpointError> {
        if !others {
            return read(&self.folder.step(step), Some(step));
        }
        let all = Together::open(&self.root, step)?;
        // As many ranks have their own.
        let own = all.of_rank(self.ranks.rank()).filter(|(_, own)| self.ranks.has_saved(own));
        let there = match own {
            Some(_) => all.first().parts.keys().cloned().collect(),
            None => all.parts(&self.begin_anew)?,
        };
        let left_out = all.first().parts.keys().filter(|&name| !there.contains(name)).cloned().collect();
        let mut states = BTreeMap::new();
        if let Some(parts) = parts {
            check_all_parts(&all.folder, &names(&all.first().parts), parts.iter().map(|(name, _)| *name))?;
            for ((name, part), (_, shard)) in parts.iter().zip(shards_of(parts)?) {
                if !there.contains(*name) {
                    continue;
                }
                let own = own.filter(|(_, own)| is_parted(own, name, shard));
                let state = match own.and_then(|(folder, own)| Some((folder, own.parts.get(*name)?))) {
                    Some((folder, own)) => read_entries(folder, name, own.clone(), None)?,
                    None => all.read(name, *part)?,
                };
                states.insert((*name).to_owned(), state);
            }
        }
        let (folder, manifest) = own.unwrap_or((&all.folder, all.first()));
        let (folder, fields) = (folder.to_path_buf(), manifest.fields.clone());
        Ok(Saved { folder, step, together: all.mark(), left_out, parts: states, fields })
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
        let others = self.others_have_saved(Some(&shared(parts)))?;
        let steps = if others { together::steps(&self.root) } else { self.folder.steps() };
        let saved = steps.and_then(|found| match found.contains(&step) {
            true => self.read(step, others, Some(&shared(parts))),
            false => Err(CheckpointError::NoSuchStep { folder: self.folder.root().to_path_buf(), step, found }),
        });
        let saved = self.ranks.all(&format!("read its checkpoint of step {step}"), saved)?;
        self.check_together(&saved)?;
        self.load_everywhere(saved, parts)
    }

    /// The newest checkpoint that all ranks have undamaged.
    fn search(&self, steps: &[u64], others: bool, parts: Option<&Parts<'_>>) -> Result<Search, CheckpointError> {
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
            let saved = self.read(step, others, parts);
            match (self.ranks.worst(Verdict::of(&saved))?, saved) {
                (Verdict::Good, Ok(saved)) => {
                    search.found = Some(saved);
                    return Ok(search);
                }
                (Verdict::Damaged, saved) => {
                    let error = match saved {
                        Ok(_) => self.other(step),
                        Err(error) => {
                            // Of what others have saved, this rank's part may be whole.
                            search.damaged.extend((!others).then_some(step));
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
        others: bool,
        skipped: Option<CheckpointError>,
    ) -> Result<Option<T>, CheckpointError> {
        let nothing =
            || CheckpointError::NoCommonStep { folder: self.folder.root().to_path_buf(), found: found.clone() };
        // A rank may have died while the very first checkpoint was written: then the other ranks have one, and it has
        // none. A rank begins its second only when all ranks have the first, so two without a common step are an error.
        // So is a folder that is missing: ranks make theirs when the run begins.
        let are_some = self.ranks.any(!found.is_empty())?;
        let own = match (others, skipped) {
            (true, skipped) => match together::unfinished(&self.root) {
                Ok(Some(ranks)) if !self.folder.is_new() || self.ranks.rank() >= ranks => Ok(()),
                Ok(_) => Err(skipped.unwrap_or_else(nothing)),
                Err(error) => Err(error),
            },
            (false, Some(error)) => return Err(error),
            (false, None) if found.len() < 2 && !(are_some && self.folder.is_new()) => Ok(()),
            (false, None) => Err(nothing()),
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
