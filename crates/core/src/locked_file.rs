//! A file that other processes are locked out of.

use std::fs::File;
use std::ops::Deref;

/// A locked file, whose lock ends with this value.
///
/// Closing a file is not enough: a child process holds a copy of the descriptor, and the lock with it, from its `fork`
/// to its `exec`. Another opener would find the file locked meanwhile.
#[derive(Debug)]
pub struct LockedFile(File);

impl LockedFile {
    /// Takes over a file that the caller has locked, for example by [`File::try_lock`].
    pub fn new(locked: File) -> Self {
        Self(locked)
    }
}

impl Deref for LockedFile {
    type Target = File;

    fn deref(&self) -> &File {
        &self.0
    }
}

impl Drop for LockedFile {
    fn drop(&mut self) {
        // If this fails, the lock still ends when the last copy of the descriptor is closed.
        let _ = self.0.unlock();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_of_the_descriptor_does_not_keep_the_lock() {
        let path = std::env::temp_dir().join(format!("overdrive-locked-file-{}", std::process::id()));
        let open = || File::options().create(true).truncate(false).write(true).open(&path).unwrap();
        let file = open();
        file.try_lock().unwrap();
        let locked = LockedFile::new(file);
        // What a child process has between `fork` and `exec`.
        let copy = locked.try_clone().unwrap();
        assert!(open().try_lock().is_err());
        drop(locked);
        open().try_lock().unwrap();
        drop(copy);
        std::fs::remove_file(&path).unwrap();
    }
}
