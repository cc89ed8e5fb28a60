//! A file that is written under another name first.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{CheckpointError, Context};
use crate::folder::sync_folder;

const WRITING: &str = ".writing-";

/// A file beside the one that it becomes, removed unless it does. Its lock tells it from those that crashes have left.
pub(crate) struct Aside {
    path: PathBuf,
    pub file: File,
}

impl Aside {
    /// Makes one with a name of its own: two processes may write the same file, and the last one's counts.
    pub fn new(target: &Path) -> Result<Self, CheckpointError> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        remove_left(target);
        loop {
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let path = target.with_file_name(format!("{}{}-{number}", prefix(target), std::process::id()));
            let made = match File::options().write(true).create_new(true).open(&path) {
                // Of a process in another container.
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => continue,
                made => made.when("make the file", &path)?,
            };
            let is_locked = match made.try_lock() {
                Ok(()) => true,
                Err(TryLockError::WouldBlock) => false,
                // Then others cannot lock it either, and leave it.
                Err(TryLockError::Error(_)) => true,
            };
            // Before it was locked, another process may have taken it for a left one.
            if is_locked && path.exists() {
                return Ok(Self { path, file: made });
            }
        }
    }

    /// Gives the file its name, durably.
    pub fn publish(self, target: &Path) -> Result<(), CheckpointError> {
        self.file.sync_all().when("sync it", &self.path)?;
        fs::rename(&self.path, target).when(format!("rename it to {}", target.display()), &self.path)?;
        sync_folder(folder_of(target))
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        // Not there once it has its name.
        let _ = fs::remove_file(&self.path);
    }
}

fn prefix(target: &Path) -> String {
    format!("{WRITING}{}.", target.file_name().unwrap_or_default().to_string_lossy())
}

fn folder_of(target: &Path) -> &Path {
    target.parent().filter(|it| !it.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

/// Removes what crashes have left of writing the same file. What cannot be removed only takes disk space.
fn remove_left(target: &Path) {
    let (prefix, entries) = (prefix(target), fs::read_dir(folder_of(target)));
    for entry in entries.into_iter().flatten().flatten() {
        if entry.file_name().to_str().is_some_and(|name| name.starts_with(&prefix))
            && File::options().write(true).open(entry.path()).is_ok_and(|file| file.try_lock().is_ok())
        {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn several_write_one_file_at_once_and_what_crashes_have_left_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let target = folder.path().join("whole.safetensors");
        let names = || fs::read_dir(folder.path()).unwrap().map(|it| it.unwrap().file_name()).collect::<Vec<_>>();
        fs::write(folder.path().join(".writing-whole.safetensors.1-7"), "left").unwrap();
        fs::write(folder.path().join(".writing-other.safetensors.1-7"), "of another file").unwrap();
        let (one, two) = (Aside::new(&target).unwrap(), Aside::new(&target).unwrap());
        assert_eq!(names().len(), 3, "that of another file, and two of this");
        drop(one);
        assert!(!target.exists());
        two.publish(&target).unwrap();
        assert!(target.exists());
        assert_eq!(names().len(), 2);
    }
}
