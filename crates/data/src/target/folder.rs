//! Files in one folder per class.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Result, anyhow};
use tempfile::TempDir;

use super::{Refused, Target, move_folder};
use crate::names::{file_name, without_dots};
use crate::sample::{LABEL, Sample, extension};

/// Writes `root/class/name.jpg`: the class is the first part of the key, or else the field `cls`.
pub struct Folder {
    path: PathBuf,
    staging: TempDir,
    /// The labels by class and key. They are written as files only if they differ from the numbers that a reader
    /// assigns.
    labels: BTreeMap<String, BTreeMap<String, Vec<u8>>>,
}

impl Folder {
    pub fn create(path: &Path, staging: TempDir) -> Self {
        Self { path: path.to_owned(), staging, labels: BTreeMap::new() }
    }

    fn put(&self, key: &str, field: &str, content: &[u8]) -> Result<(), Refused> {
        let name = file_name(key, field).map_err(|bad| Refused::Sample(bad.into()))?;
        let path = self.staging.path().join(&name);
        let all = |error: std::io::Error| {
            Refused::All(anyhow!(error).context(format!("cannot write {}", self.path.join(&name).display())))
        };
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder).map_err(all)?;
        }
        match OpenOptions::new().write(true).create_new(true).open(&path) {
            Ok(mut file) => file.write_all(content).map_err(all),
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                Err(Refused::Sample(anyhow!("key {key:?}: {} already exists", name.display())))
            }
            Err(error) => Err(all(error)),
        }
    }
}

impl Target for Folder {
    fn write(&mut self, mut sample: Sample) -> Result<(), Refused> {
        sample.fields.iter_mut().for_each(|(field, _)| *field = extension(field));
        sample.check_names().map_err(Refused::Sample)?;
        let label = sample.get(LABEL);
        let mut key = without_dots(&sample.key);
        if !key.contains('/') {
            let class = label.and_then(|label| std::str::from_utf8(label).ok()).map(str::trim);
            let class = class.filter(|class| !class.is_empty() && !class.contains('/'));
            let no_class = || anyhow!("key {key:?}: an image folder needs a class, as in `cat/{key}` or a field cls");
            key = format!("{}/{key}", class.ok_or_else(|| Refused::Sample(no_class()))?);
        }
        // Check all names first, so that a refused sample leaves no file.
        for (field, _) in &sample.fields {
            file_name(&key, field).map_err(|bad| Refused::Sample(bad.into()))?;
        }
        let others = sample.fields.iter().filter(|(field, _)| field != LABEL);
        others.clone().try_for_each(|(field, content)| self.put(&key, field, content))?;
        let class = key.split('/').next().unwrap_or_default().to_owned();
        let labels = self.labels.entry(class).or_default();
        if let Some(label) = label {
            labels.insert(key, label.to_owned());
        }
        Ok(())
    }

    fn finish(self: Box<Self>) -> Result<()> {
        let unusual = |(number, labels): (usize, &BTreeMap<String, Vec<u8>>)| {
            labels.values().any(|label| *label != number.to_string().as_bytes())
        };
        if self.labels.values().enumerate().any(unusual) {
            for (key, label) in self.labels.values().flatten() {
                self.put(key, LABEL, label).map_err(|(Refused::Sample(error) | Refused::All(error))| error)?;
            }
        }
        let Self { path, staging, .. } = *self;
        move_folder(staging, &path)
    }
}
