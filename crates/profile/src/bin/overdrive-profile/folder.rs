//! The folder that `overdrive-profile run` records into. Files of other programs are not touched, and an earlier record
//! is replaced only when the new one is complete.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use overdrive_profile::{Diagnosis, ProfileError, RunProfile};
use tempfile::TempDir;

use crate::records::{Records, is_record, is_trace, names};

const PAGE: &str = "profile.html";

pub struct Folder {
    path: PathBuf,
    /// The folder within it that the program writes to. Its files move to `path` when the record is complete.
    recording: TempDir,
    was_there: bool,
}

impl Folder {
    /// Creates the folder if it is missing.
    ///
    /// # Errors
    /// When a file that is not of an earlier run has a name that the record's files get, or the folder cannot be
    /// written.
    pub fn prepare(path: &Path) -> Result<Self> {
        let was_there = path.exists();
        fs::create_dir_all(path).with_context(|| format!("cannot create the folder {}", path.display()))?;
        refuse_foreign_files(path)?;
        // The program gets an absolute path, because it may change its working directory.
        let path = path.canonicalize().with_context(|| format!("cannot find {}", path.display()))?;
        let recording = tempfile::Builder::new()
            .prefix(".recording-")
            .tempdir_in(&path)
            .with_context(|| format!("cannot write into {}", path.display()))?;
        Ok(Self { path, recording, was_there })
    }

    /// The folder that the program writes to.
    pub fn recording(&self) -> &Path {
        self.recording.path()
    }

    /// Adds the page and the merged record, and replaces the files of an earlier run. Returns the new files' paths, the
    /// page first.
    pub fn complete(self, records: &Records, diagnosis: &Diagnosis) -> Result<Vec<PathBuf>> {
        records.tidy(self.recording())?;
        records.run.write_html(diagnosis, self.recording().join(PAGE))?;
        records.run.write_json(self.recording().join("profile.json"))?;
        let new = names(self.recording(), is_ours)?;
        for name in &new {
            let path = self.path.join(name);
            fs::rename(self.recording().join(name), &path)
                .with_context(|| format!("cannot move the new file to {}", path.display()))?;
        }
        for old in names(&self.path, is_ours)?.iter().filter(|name| !new.contains(name)) {
            let old = self.path.join(old);
            fs::remove_file(&old).with_context(|| format!("cannot remove {}", old.display()))?;
        }
        Ok(new.iter().map(|name| self.path.join(name)).collect())
    }

    /// Leaves the folder as it was; removes it if it was created for this run.
    pub fn discard(self) {
        drop(self.recording);
        if !self.was_there {
            // Fails if another program has put a file into it; then the folder should stay.
            let _ = fs::remove_dir(&self.path);
        }
    }
}

fn is_ours(name: &str) -> bool {
    name == PAGE || is_record(name) || is_trace(name)
}

/// Refuses a folder in which a file has one of our names but is not of an earlier run. Without a record in the folder,
/// nothing shows that a page or a trace is of a run.
fn refuse_foreign_files(path: &Path) -> Result<()> {
    let found = names(path, is_ours)?;
    let records: Vec<&String> = found.iter().filter(|name| is_record(name)).collect();
    // Records of other versions cannot be read, but are of an earlier run too.
    let is_foreign = |name: &&&String| match RunProfile::read_json(path.join(name)) {
        Ok(_) => false,
        Err(ProfileError::Setting { .. }) => !has_schema(&path.join(name)),
        Err(_) => true,
    };
    let foreign = match records.iter().find(is_foreign) {
        Some(name) => Some(*name),
        None if records.is_empty() => found.first(),
        None => None,
    };
    match foreign {
        Some(name) => bail!("{} is not of an earlier run: give another folder by --out", path.join(name).display()),
        None => Ok(()),
    }
}

/// Whether a file that cannot be read as a record has the fields that records of every version have.
fn has_schema(path: &Path) -> bool {
    let value = fs::read(path).ok().and_then(|bytes| serde_json::from_slice::<serde_json::Value>(&bytes).ok());
    value.is_some_and(|value| value["schema"].is_u64() && value["command"].is_array() && value["machine"].is_object())
}
