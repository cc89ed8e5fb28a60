//! The note that a rank has not completed its first checkpoint.
//!
//! Each rank makes it before any rank writes a first checkpoint, and removes it when its own is in place. So where ranks
//! were ended meanwhile, the run may begin anew: no checkpoint was ever complete. A rank that has neither a checkpoint nor
//! the note has lost its checkpoints.
//!
//! Each line is an attempt: `STEP WORLD_SIZE`. Those of earlier attempts stay, because another rank may still have its
//! checkpoint of one. As soon as a step is complete, no note counts, and all are removed.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::error::{CheckpointError, Context};
use crate::folder::{Folder, sync_folder};

/// The file's name.
const NOTE: &str = ".first-step";
/// Under this name it is written first.
const WRITING: &str = ".writing-first-step";

fn note(folder: &Path) -> PathBuf {
    folder.join(NOTE)
}

fn line(step: u64, world_size: usize) -> String {
    format!("{step} {world_size}\n")
}

/// Notes, durably, that the checkpoint of this step by so many ranks will be the first in the folder, if there is none.
pub(crate) fn begin(folder: &Folder, step: u64, world_size: usize) -> Result<(), CheckpointError> {
    if !folder.steps()?.is_empty() {
        return end(folder.root());
    }
    let (before, new) = (read(folder.root())?, line(step, world_size));
    if before.split_inclusive('\n').any(|line| line == new) {
        return Ok(());
    }
    let (aside, path) = (folder.root().join(WRITING), note(folder.root()));
    let mut file = File::create(&aside).when("make the file", &aside)?;
    let text = before + &new;
    file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).when("write to it", &aside)?;
    fs::rename(&aside, &path).when(format!("rename it to {}", path.display()), &aside)?;
    sync_folder(folder.root())
}

/// Removes the note in this folder: a checkpoint is complete.
pub(crate) fn end(folder: &Path) -> Result<(), CheckpointError> {
    let path = note(folder);
    match fs::remove_file(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.when("remove it", &path),
    }
}

/// Whether a first checkpoint of this step by so many ranks was begun, and there is none.
pub(crate) fn is_begun(folder: &Folder, step: u64, world_size: usize) -> Result<bool, CheckpointError> {
    if !folder.steps()?.is_empty() {
        return Ok(false);
    }
    let line = line(step, world_size);
    Ok(read(folder.root())?.split_inclusive('\n').any(|found| found == line))
}

/// The note; nothing where there is none, or it is no text.
fn read(folder: &Path) -> Result<String, CheckpointError> {
    let path = note(folder);
    match fs::read_to_string(&path) {
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidData) => Ok(String::new()),
        text => text.when("read it", &path),
    }
}
