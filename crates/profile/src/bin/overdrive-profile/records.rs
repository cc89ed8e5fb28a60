//! Finds the records in a folder, chooses one per rank, and merges them.
//!
//! A record is the profile that a process wrote as JSON, mostly with a trace beside it. A process writes one for each
//! of its step timers, and restarts and helper programs write further ones.

use std::cmp::Ordering;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use overdrive_profile::{ProfileError, RunProfile};

/// The file name of the record that merges all ranks.
pub const MERGED: &str = "profile.json";

/// Whether a file of this name is a record: `profile.json` or, of several ranks, `profile.rank3.json`. During a run,
/// the process ID and the timer's number come before the extension: `profile.1234-0.json`, `profile.rank3.1234-0.json`.
pub fn is_record(name: &str) -> bool {
    final_name("profile", name, ".json").is_some()
}

/// Whether a file of this name is a record's trace: `trace.json.gz`, `trace.rank3.1234-0.json.gz`.
pub fn is_trace(name: &str) -> bool {
    final_name("trace", name, ".json.gz").is_some()
}

/// The name without the process ID and the timer's number. None if it is not `stem`, then a rank, then these numbers,
/// then `ending`.
fn final_name(stem: &str, name: &str, ending: &str) -> Option<String> {
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

/// The file names in a folder that the filter accepts, sorted.
pub fn names(folder: &Path, accepts: impl Fn(&str) -> bool) -> Result<Vec<String>> {
    let context = || format!("cannot read the folder {}", folder.display());
    let entries = fs::read_dir(folder).with_context(context)?.collect::<Result<Vec<_>, _>>().with_context(context)?;
    let names = entries.into_iter().filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| accepts(name)).collect();
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
    /// When the file cannot be read or is not a record.
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
    /// The file names of the records that `run` merges.
    names: Vec<String>,
}

impl Records {
    /// Merges the records of all ranks. None if the folder has no record.
    ///
    /// The records can be of several programs, restarts and timers. Those of the longest run are merged, where a run
    /// with a profile goes before one without. Notes name the records that are left out, and those that cannot be read.
    ///
    /// # Errors
    /// When the folder cannot be read, it has records but none can be read, or they cannot be merged.
    pub fn read(folder: &Path) -> Result<Option<Self>> {
        let Some((kept, notes)) = of_one_run(folder, is_record)? else { return Ok(None) };
        let names = kept.iter().filter_map(Record::name).collect();
        let mut run = RunProfile::merge_ranks(kept.into_iter().map(|record| record.run).collect())?;
        run.notes.extend(notes);
        Ok(Some(Self { run, names }))
    }

    /// Removes the files of records that were left out, and gives the others their final names.
    pub fn tidy(&self, folder: &Path) -> Result<()> {
        let traces: Vec<String> = self.names.iter().filter_map(|name| trace_beside(name)).collect();
        let kept = |name: &str| self.names.iter().chain(&traces).any(|it| it == name);
        let files = names(folder, |name| is_record(name) || is_trace(name))?;
        let (kept, left_out): (Vec<String>, Vec<String>) = files.into_iter().partition(|name| kept(name));
        // Removed first, because one of them may have a final name.
        for name in left_out {
            let path = folder.join(name);
            fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
        for name in kept {
            let path = folder.join(&name);
            let to = final_name("profile", &name, ".json").or_else(|| final_name("trace", &name, ".json.gz"));
            fs::rename(&path, folder.join(to.unwrap_or(name)))
                .with_context(|| format!("cannot rename {}", path.display()))?;
        }
        Ok(())
    }
}

/// The records of one run in a folder, one per rank, and notes about the others whose names the filter accepts. None if
/// it accepts none.
///
/// # Errors
/// When the folder cannot be read, or it has records but none can be read.
pub fn of_one_run(folder: &Path, accepts: impl Fn(&str) -> bool) -> Result<Option<(Vec<Record>, Vec<String>)>> {
    let mut records = Vec::new();
    let mut notes = Vec::new();
    for name in names(folder, accepts)? {
        match Record::read(folder.join(&name)) {
            Ok(record) => records.push(record),
            Err(error) => notes.push(format!("{name} is left out: {error}")),
        }
    }
    records.sort_by(|one, other| priority(&other.run).partial_cmp(&priority(&one.run)).unwrap_or(Ordering::Equal));
    let Some(chosen) = records.first().map(|record| (record.run.command.clone(), record.run.world_size)) else {
        return if notes.is_empty() { Ok(None) } else { bail!(notes.join("; ")) };
    };
    let mut kept: Vec<Record> = Vec::new();
    for record in records {
        let run = &record.run;
        let is_same_run = (&run.command, run.world_size) == (&chosen.0, chosen.1);
        if is_same_run && kept.iter().all(|other| other.run.rank != run.rank) {
            kept.push(record);
        } else {
            let steps = run.steps.as_ref().map_or(0, |steps| steps.steps_seen);
            let command = run.command.join(" ");
            let chosen = if is_same_run { "the chosen one of this rank" } else { "the chosen run" };
            notes.push(format!(
                "a record of rank {} is left out, with {steps} steps of `{command}`: {chosen} has a profile, took \
                 longer, or comes first by name",
                run.rank
            ));
        }
    }
    Ok(Some((kept, notes)))
}

/// The file name of a record's trace: `trace.rank3.1234-0.json.gz` for `profile.rank3.1234-0.json`.
fn trace_beside(record: &str) -> Option<String> {
    Some(format!("trace{}.json.gz", record.strip_prefix("profile")?.strip_suffix(".json")?))
}

/// The record with the largest is chosen: a record with a profile before one without, then the one whose steps took
/// longest.
fn priority(run: &RunProfile) -> (bool, f64) {
    (run.profiled.is_some(), run.steps.as_ref().map_or(0.0, |steps| steps.total_seconds))
}

/// Reads a record from a file, or merges those in a folder, unless `run` has already merged them there.
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

    #[test]
    fn a_record_that_is_left_out_does_not_take_the_final_name_of_the_chosen_one() {
        let folder = tempfile::tempdir().unwrap();
        let mut run = RunProfile::default();
        (run.schema, run.world_size) = (1, 2);
        // Of equally long records, the first one by name is chosen.
        for (label, command) in [(".7-0", "chosen"), ("", "left out")] {
            run.command = vec![command.to_owned()];
            run.write_json(folder.path().join(format!("profile.rank0{label}.json"))).unwrap();
            fs::write(folder.path().join(format!("trace.rank0{label}.json.gz")), command).unwrap();
        }
        Records::read(folder.path()).unwrap().unwrap().tidy(folder.path()).unwrap();
        assert_eq!(names(folder.path(), |_| true).unwrap(), ["profile.rank0.json", "trace.rank0.json.gz"]);
        let kept = RunProfile::read_json(folder.path().join("profile.rank0.json")).unwrap();
        let trace = fs::read_to_string(folder.path().join("trace.rank0.json.gz")).unwrap();
        assert_eq!((kept.command[0].as_str(), trace.as_str()), ("chosen", "chosen"));
    }
}
