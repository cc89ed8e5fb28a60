//! Writes files at once: under another name first, then renamed.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use super::FileError;

/// A complete file under a temporary name beside its own, which is removed unless it gets its name.
pub(super) struct Written {
    temporary: PathBuf,
    path: PathBuf,
}

impl Written {
    /// Writes the file and waits until it is on the disk.
    pub fn new(path: &Path, fill: impl FnOnce(&File) -> Result<(), FileError>) -> Result<Self, FileError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let temporary = path.with_file_name(format!(".{name}.{}-{number}.tmp", std::process::id()));
        let file = File::create(&temporary).map_err(FileError::io("write", path))?;
        let written = Self { temporary, path: path.to_owned() };
        fill(&file)?;
        file.sync_all().map_err(FileError::io("write", path))?;
        Ok(written)
    }

    /// Gives the file its name, in place of an earlier file.
    pub fn publish(self) -> Result<(), FileError> {
        fs::rename(&self.temporary, &self.path).map_err(FileError::io("write", &self.path))
    }
}

impl Drop for Written {
    fn drop(&mut self) {
        // Not there after `publish`.
        let _ = fs::remove_file(&self.temporary);
    }
}
