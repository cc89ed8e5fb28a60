//! The records in a folder.

use std::cmp::Ordering;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use overdrive_profile::{ProfileError, RunProfile};

/// The merged record of all ranks.
pub const MERGED: &str = "profile.json";

/// `profile.json`, `profile.rank3.json`; while a run is recorded, also `profile.rank3.1234-0.json`.
pub fn is_record(name: &str) -> bool {
    plain("profile", name, ".json").is_some()
}

/// `trace.json.gz`, `trace.rank3.json.gz`, `trace.rank3.1234-0.json.gz`.
pub fn is_trace(name: &str) -> bool {
    plain("trace", name, ".json.gz").is_some()
}

/// The name without the numbers of the process and its timer. None if it is not the name of such a file.
fn plain(stem: &str, name: &str, ending: &str) -> Option<String> {
    let is_number = |digits: &str| !digits.is_empty() && digits.bytes().all(|byte| byte.is_ascii_digit());
    let is_rank = |part: &str| part.strip_prefix("rank").is_some_and(is_number);
    let is_label =
        |part: &str| part.split_once('-').is_some_and(|(process, timer)| is_number(process) && is_number(timer));
    let parts: Vec<&str> = name.strip_prefix(stem)?.strip_suffix(ending)?.split('.').collect();
    match parts[..] {
        [""] => Some(name.to_owned()),
        ["", rank] if is_rank(rank) => Some(name.to_owned()),
        ["", label] if is_label(label) => Some(format!("{stem}{ending}")),
        ["", rank, label] if is_rank(rank) && is_label(label) => Some(format!("{stem}.{rank}{ending}")),
        _ => None,
    }
}

/// The names in a folder that pass, sorted.
pub fn names(folder: &Path, passes: impl Fn(&str) -> bool) -> Result<Vec<String>> {
    let cannot = || format!("cannot read the folder {}", folder.display());
    let entries = fs::read_dir(folder).with_context(cannot)?.collect::<Result<Vec<_>, _>>().with_context(cannot)?;
    let names = entries.into_iter().filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| passes(name)).collect();
    names.sort();
    Ok(names)
}

/// The record of a process, and its file.
pub struct Record {
    pub path: PathBuf,
    pub run: RunProfile,
}

impl Record {
    /// # Errors
    /// When there is none.
    pub fn read(path: PathBuf) -> Result<Self, ProfileError> {
        let run = RunProfile::read_json(&path)?;
        Ok(Self { path, run })
    }

    fn name(&self) -> Option<String> {
        Some(self.path.file_name()?.to_str()?.to_owned())
    }
}

/// The merged records of a run.
pub struct Records {
    pub run: RunProfile,
    /// The names of the merged records.
    names: Vec<String>,
}

impl Records {
    /// The program's record, with all its ranks. Of several programs, restarts and timers, the longest profiled and
    /// timed one is taken; notes name the others, and those that cannot be read. None if there is no record.
    ///
    /// # Errors
    /// When none of them can be read.
    pub fn read(folder: &Path) -> Result<Option<Self>> {
        let Some((kept, notes)) = of_one_run(folder, is_record)? else { return Ok(None) };
        let names = kept.iter().filter_map(Record::name).collect();
        let mut run = RunProfile::merge_ranks(kept.into_iter().map(|record| record.run).collect())?;
        run.notes.extend(notes);
        Ok(Some(Self { run, names }))
    }

    /// Gives the files their final names, and removes the files of records that were left out.
    pub fn tidy(&self, folder: &Path) -> Result<()> {
        let traces: Vec<String> = self.names.iter().filter_map(|name| trace_beside(name)).collect();
        let kept = |name: &str| self.names.iter().chain(&traces).any(|it| it == name);
        for name in names(folder, |name| is_record(name) || is_trace(name))? {
            let path = folder.join(&name);
            let cannot = || format!("cannot move or remove {}", path.display());
            let plain = plain("profile", &name, ".json").or_else(|| plain("trace", &name, ".json.gz"));
            match plain.filter(|_| kept(&name)) {
                Some(plain) => fs::rename(&path, folder.join(plain)).with_context(cannot)?,
                None => fs::remove_file(&path).with_context(cannot)?,
            }
        }
        Ok(())
    }
}

/// The records in a folder whose names pass, one for each rank, and notes about the others. None if there is no record.
///
/// # Errors
/// When none of them can be read.
pub fn of_one_run(folder: &Path, passes: impl Fn(&str) -> bool) -> Result<Option<(Vec<Record>, Vec<String>)>> {
    let mut records = Vec::new();
    let mut notes = Vec::new();
    for name in names(folder, passes)? {
        match Record::read(folder.join(&name)) {
            Ok(record) => records.push(record),
            Err(error) => notes.push(format!("{name} is left out: {error}")),
        }
    }
    records.sort_by(|one, other| length(&other.run).partial_cmp(&length(&one.run)).unwrap_or(Ordering::Equal));
    let Some(longest) = records.first().map(|record| (record.run.command.clone(), record.run.world_size)) else {
        return if notes.is_empty() { Ok(None) } else { bail!(notes.join("; ")) };
    };
    let mut kept: Vec<Record> = Vec::new();
    for record in records {
        let run = &record.run;
        let is_of_it = (&run.command, run.world_size) == (&longest.0, longest.1);
        if is_of_it && kept.iter().all(|other| other.run.rank != run.rank) {
            kept.push(record);
        } else {
            let steps = run.steps.as_ref().map_or(0, |steps| steps.steps_seen);
            let command = run.command.join(" ");
            notes.push(format!("a shorter record is left out: {steps} steps of rank {}: {command}", run.rank));
        }
    }
    Ok(Some((kept, notes)))
}

/// The trace of a record: `trace.rank3.1234-0.json.gz`.
fn trace_beside(record: &str) -> Option<String> {
    Some(format!("trace{}.json.gz", record.strip_prefix("profile")?.strip_suffix(".json")?))
}

/// What makes a record longer: a profile, then the time of the steps.
fn length(run: &RunProfile) -> (bool, f64) {
    (run.profiled.is_some(), run.steps.as_ref().map_or(0.0, |steps| steps.total_seconds))
}

/// The record in a file, or in a folder: the merged one if there is one.
pub fn read(path: &Path) -> Result<RunProfile> {
    if !path.is_dir() {
        return Ok(RunProfile::read_json(path)?);
    }
    let merged = path.join(MERGED);
    if merged.exists() {
        return Ok(RunProfile::read_json(merged)?);
    }
    let records = Records::read(path)?.with_context(|| {
        format!("{} holds no profile.json: `overdrive-profile run --out {0} -- PROGRAM` makes one", path.display())
    })?;
    Ok(records.run)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_recorder() {
        assert!(["profile.json", "profile.rank0.json", "profile.rank12.7-0.json"].into_iter().all(is_record));
        assert!(["trace.json.gz", "trace.rank1.json.gz", "trace.81-1.json.gz"].into_iter().all(is_trace));
        for name in [
            "profile.rank.json",
            "profile.rankx.json",
            "my.profile.json",
            "profilejson",
            "profile..json",
            "profile",
            "profile.1.json",
            "profile.1-.json",
            "profile.1-0.rank0.json",
        ] {
            assert!(!is_record(name), "{name}");
        }
        assert!(!is_trace("trace.json") && !is_trace("profile.json"));
    }
}
