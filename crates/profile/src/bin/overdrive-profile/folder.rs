//! The folder that a run is recorded into: nobody else's files are touched, and an earlier record goes when the new one is
//! complete.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, bail};
use overdrive_profile::{Diagnosis, ProfileError, RunProfile};
use tempfile::TempDir;

use crate::records::{Records, is_record, is_trace, names};

const PAGE: &str = "profile.html";

pub struct Folder {
    path: PathBuf,
    /// Where the program records, until all is complete.
    recording: TempDir,
    was_there: bool,
}

impl Folder {
    /// Makes the folder, unless it is there.
    ///
    /// # Errors
    /// When files of others have the names that will be needed, or nothing can be written.
    pub fn prepare(path: &Path) -> Result<Self> {
        let was_there = path.exists();
        fs::create_dir_all(path).with_context(|| format!("cannot make the folder {}", path.display()))?;
        refuse_strangers(path)?;
        // Ranks may go into other folders before they record.
        let path = path.canonicalize().with_context(|| format!("cannot find {}", path.display()))?;
        let recording = tempfile::Builder::new()
            .prefix(".recording-")
            .tempdir_in(&path)
            .with_context(|| format!("cannot write into {}", path.display()))?;
        Ok(Self { path, recording, was_there })
    }

    /// Where the program records.
    pub fn recording(&self) -> &Path {
        self.recording.path()
    }

    /// Completes the record, and puts it in the place of an earlier one. The files' paths, the page first.
    pub fn complete(self, records: &Records, diagnosis: &Diagnosis) -> Result<Vec<PathBuf>> {
        records.tidy(self.recording())?;
        records.run.write_html(diagnosis, self.recording().join(PAGE))?;
        records.run.write_json(self.recording().join("profile.json"))?;
        let new = names(self.recording(), is_ours)?;
        for name in &new {
            let path = self.path.join(name);
            fs::rename(self.recording().join(name), &path)
                .with_context(|| format!("cannot put {} in its place", path.display()))?;
        }
        for old in names(&self.path, is_ours)?.iter().filter(|name| !new.contains(name)) {
            let old = self.path.join(old);
            fs::remove_file(&old).with_context(|| format!("cannot remove {}", old.display()))?;
        }
        Ok(new.iter().map(|name| self.path.join(name)).collect())
    }

    /// Leaves the folder as it was: not at all, if it was made for this.
    pub fn discard(self) {
        drop(self.recording);
        if !self.was_there {
            // Fails where something else is in it, as it should.
            let _ = fs::remove_dir(&self.path);
        }
    }
}

fn is_ours(name: &str) -> bool {
    name == PAGE || is_record(name) || is_trace(name)
}

/// A folder with our names in it has to hold a record.
fn refuse_strangers(path: &Path) -> Result<()> {
    let found = names(path, is_ours)?;
    let records: Vec<&String> = found.iter().filter(|name| is_record(name)).collect();
    // A record of another version is one, too.
    let is_strange = |name: &&&String| match RunProfile::read_json(path.join(name)) {
        Ok(_) => false,
        Err(ProfileError::Setting { .. }) => !names_a_schema(&path.join(name)),
        Err(_) => true,
    };
    let strange = match records.iter().find(is_strange) {
        Some(name) => Some(*name),
        None if records.is_empty() => found.first(),
        None => None,
    };
    match strange {
        Some(name) => bail!("{} is not of an earlier run: name another folder by --out", path.join(name).display()),
        None => Ok(()),
    }
}

fn names_a_schema(path: &Path) -> bool {
    let value = fs::read(path).ok().and_then(|bytes| serde_json::from_slice::<serde_json::Value>(&bytes).ok());
    value.is_some_and(|value| value["schema"].is_u64() && value["command"].is_array() && value["machine"].is_object())
}
