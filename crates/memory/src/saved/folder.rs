//! A folder for one process, which another one removes if this one is killed.

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::Path;

use overdrive_core::LockedFile;
use tempfile::TempDir;

const PREFIX: &str = "saved-tensors-";

/// A new folder, removed when it is dropped. A lock on it says that its process lives; where the file system has no locks,
/// nothing of a killed process is removed.
pub(super) struct OwnFolder {
    folder: TempDir,
    // Dropped when the folder is gone.
    _lock: Option<LockedFile>,
}

impl OwnFolder {
    /// In this folder, after what killed processes have left there is removed.
    pub fn within(parent: &Path) -> io::Result<Self> {
        remove_left(parent)?;
        loop {
            let folder = tempfile::Builder::new().prefix(PREFIX).tempdir_in(parent)?;
            let lock = match File::open(folder.path()).map(|opened| (opened.try_lock(), opened)) {
                Ok((Ok(()), opened)) => Some(LockedFile::new(opened)),
                Ok((Err(TryLockError::Error(_)), _)) => None,
                // Another process has taken it for one of a killed process, before it was locked.
                Ok((Err(TryLockError::WouldBlock), _)) => continue,
                Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
                Err(error) => return Err(error),
            };
            if folder.path().exists() {
                return Ok(Self { folder, _lock: lock });
            }
        }
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }
}

fn remove_left(parent: &Path) -> io::Result<()> {
    for entry in fs::read_dir(parent)? {
        let entry = entry?;
        let is_ours =
            entry.file_name().to_string_lossy().starts_with(PREFIX) && entry.file_type().is_ok_and(|it| it.is_dir());
        // It may be removed by another process meanwhile, or belong to another user.
        if is_ours
            && let Ok(folder) = File::open(entry.path())
            && folder.try_lock().is_ok()
        {
            let _ = fs::remove_dir_all(entry.path());
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_killed_process_left_is_removed_and_nothing_else() {
        let parent = tempfile::tempdir().unwrap();
        let left = parent.path().join("saved-tensors-of-a-killed-process");
        let other = parent.path().join("other");
        [&left, &other].iter().for_each(|folder| fs::create_dir(folder).unwrap());
        fs::write(left.join("0"), "values").unwrap();
        fs::write(parent.path().join("saved-tensors-and-no-folder"), "").unwrap();
        let living = OwnFolder::within(parent.path()).unwrap();
        assert!(!left.exists() && other.exists() && living.path().exists());
        let second = OwnFolder::within(parent.path()).unwrap();
        assert!(living.path().exists() && second.path() != living.path());
        drop((living, second));
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 2);
    }

    #[test]
    fn processes_that_begin_together_take_nothing_from_each_other() {
        let parent = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let own = OwnFolder::within(parent.path()).unwrap();
                        fs::write(own.path().join("0"), "values").unwrap();
                        assert_eq!(fs::read(own.path().join("0")).unwrap(), b"values");
                    }
                });
            }
        });
        assert_eq!(fs::read_dir(parent.path()).unwrap().count(), 0);
    }
}
