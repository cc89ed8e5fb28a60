//! Merges the records of a run on several hosts. Each host has a folder with the records of its ranks.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use overdrive_profile::RunProfile;

use crate::records::{self, MERGED, Record, is_record};

/// Merges the records of all ranks in these folders and files. A single path may also be a merged record.
///
/// # Errors
/// When a folder or file has no record, a rank appears twice, or the records are not of one run.
pub fn read(paths: &[PathBuf]) -> Result<RunProfile> {
    if let [path] = paths {
        return records::read(path);
    }
    let mut ranks: Vec<Record> = Vec::new();
    let mut notes = Vec::new();
    for path in paths {
        let (records, more) = if path.is_dir() { of_folder(path)? } else { (vec![of_file(path)?], Vec::new()) };
        notes.extend(more.into_iter().map(|note| format!("{}: {note}", path.display())));
        for record in records {
            ranks.iter().try_for_each(|other| refuse(other, &record))?;
            ranks.push(record);
        }
    }
    let mut run = RunProfile::merge_ranks(ranks.into_iter().map(|record| record.run).collect())?;
    run.notes.extend(notes);
    Ok(run)
}

/// The records of a host's ranks, and notes about its run that the ranks' records do not have.
fn of_folder(folder: &Path) -> Result<(Vec<Record>, Vec<String>)> {
    let merged = folder.join(MERGED);
    let Some((ranks, mut notes)) = records::of_one_run(folder, |name| is_record(name) && name != MERGED)? else {
        if merged.exists() {
            return Ok((vec![of_file(&merged)?], Vec::new()));
        }
        bail!("{} holds no profile.rank*.json", folder.display());
    };
    // Notes about the host's run as a whole, such as that it ended early, are only in the merged record.
    if let Ok(merged) = RunProfile::read_json(merged) {
        let of_ranks = RunProfile::merge_ranks(ranks.iter().map(|record| record.run.clone()).collect())?.notes;
        let is_known = |note: &String| of_ranks.contains(note) || notes.contains(note);
        let more: Vec<String> = merged.notes.into_iter().filter(|note| !is_known(note)).collect();
        notes.extend(more);
    }
    Ok((ranks, notes))
}

/// Reads the record of a single rank. Refuses a merged record, which lacks the details of most ranks.
fn of_file(path: &Path) -> Result<Record> {
    let record = Record::read(path.to_owned())?;
    if !record.run.ranks.is_empty() {
        let folder = path.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."));
        bail!(
            "{} is a merged record, not that of a single rank: give the folder with its profile.rank*.json instead \
             ({}, if they are still there)",
            path.display(),
            folder.display()
        );
    }
    Ok(record)
}

/// Refuses two records that cannot be of the same run.
fn refuse(one: &Record, other: &Record) -> Result<()> {
    let both = format!("{} and {}", one.path.display(), other.path.display());
    let (a, b) = (&one.run, &other.run);
    if a.world_size != b.world_size {
        bail!("{both} are of different runs: one of {} ranks, one of {}", a.world_size, b.world_size);
    }
    if program(a) != program(b) {
        let commands = [a, b].map(|run| run.command.join(" "));
        bail!("{both} are of different runs: {:?} and {:?}", commands[0], commands[1]);
    }
    if a.rank == b.rank {
        bail!("rank {} appears twice, in {both}: give the folders of a single run, each once", a.rank);
    }
    Ok(())
}

/// The program's file name and its arguments, without the program's folder, which may differ between hosts.
fn program(run: &RunProfile) -> (Option<&OsStr>, &[String]) {
    match run.command.split_first() {
        Some((program, args)) => (Path::new(program).file_name(), args),
        None => (None, &[]),
    }
}
