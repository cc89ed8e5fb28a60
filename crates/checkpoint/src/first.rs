//! The note that a rank has not completed its first checkpoint.
//!
//! Each rank makes it before any rank writes a first checkpoint, and removes it when its own is in place. So where ranks
//! were ended meanwhile, the run may begin anew: no checkpoint was ever complete. A rank that has neither a checkpoint nor
//! the note has lost its checkpoints.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::error::{CheckpointError, Context};
use crate::folder::{Folder, sync_folder};

/// The file's name; its content is the step's number.
const NOTE: &str = ".first-step";

fn note(folder: &Path) -> PathBuf {
    folder.join(NOTE)
}

/// Notes, durably, that the checkpoint of this step will be the first in the folder, if there is none.
pub(crate) fn begin(folder: &Folder, step: u64) -> Result<(), CheckpointError> {
    if !folder.steps()?.is_empty() {
        return end(folder);
    }
    let path = note(folder.root());
    let mut file = File::create(&path).when("make the file", &path)?;
    file.write_all(step.to_string().as_bytes()).and_then(|()| file.sync_all()).when("write to it", &path)?;
    sync_folder(folder.root())
}

/// Removes the note: the folder has a checkpoint.
pub(crate) fn end(folder: &Folder) -> Result<(), CheckpointError> {
    let path = note(folder.root());
    match fs::remove_file(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.when("remove it", &path),
    }
}

/// The step of the first checkpoint, if it was begun and there is none.
pub(crate) fn begun(folder: &Folder) -> Result<Option<u64>, CheckpointError> {
    if !folder.steps()?.is_empty() {
        return Ok(None);
    }
    let path = note(folder.root());
    match fs::read_to_string(&path) {
        // Unless it is whole, a checkpoint may have been lost.
        Ok(text) => Ok(text.parse().ok()),
        Err(error) if matches!(error.kind(), io::ErrorKind::NotFound | io::ErrorKind::InvalidData) => Ok(None),
        Err(error) => Err(error).when("read it", &path),
    }
}
