//! The folder of checkpoints: names, clean-up after a crash, and removal.
//!
//! | name | what it is |
//! |---|---|
//! | `step-N` | a checkpoint |
//! | `.writing-step-N` | a checkpoint that is being written |
//! | `.replaced-step-N` | the old checkpoint of a step saved again: restored after a crash if the new one is missing |
//! | `.removed-step-N` | a checkpoint that is being removed |
//! | `damaged-step-N` | a damaged checkpoint, kept for inspection |
//! | `abandoned-step-N` | a later checkpoint of a run that went back to an earlier step and continued from there |
//! | `.first-step` | a note that a rank's first checkpoint is not complete yet (`first.rs`) |

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use overdrive_core::LockedFile;

use crate::error::{CheckpointError, Context};

const STEP: &str = "step-";
const WRITING: &str = ".writing-";
const REPLACED: &str = ".replaced-";
const REMOVED: &str = ".removed-";
const DAMAGED: &str = "damaged-";
const ABANDONED: &str = "abandoned-";

/// A folder that only this process writes to, or that it only reads.
#[derive(Debug)]
pub(crate) struct Folder {
    root: PathBuf,
    /// The lock file of a writer, none for a reader. The lock ends with this value or with the process.
    lock: Option<LockedFile>,
}

/// Calls to the operating system, which tests replace.
struct System {
    lock: fn(&File) -> Result<(), TryLockError>,
    sync: fn(&Path) -> Result<(), CheckpointError>,
}

impl Folder {
    /// Creates the folder if needed, locks out other writers, and cleans up after a crash.
    pub fn open(root: &Path) -> Result<Self, CheckpointError> {
        Self::open_on(root, &System { lock: File::try_lock, sync: sync_folder })
    }

    /// Only reads what another process writes there; the folder may not exist yet.
    pub fn reading(root: &Path) -> Self {
        Self { root: root.to_path_buf(), lock: None }
    }

    fn open_on(root: &Path, system: &System) -> Result<Self, CheckpointError> {
        make(root, system.sync)?;
        let path = root.join(".lock");
        let lock = File::options().create(true).truncate(false).write(true).open(&path).when("open it", &path)?;
        let locked = match (system.lock)(&lock) {
            Ok(()) => true,
            Err(TryLockError::WouldBlock) => return Err(CheckpointError::InUse { folder: root.to_path_buf() }),
            // A network file system may not support locks.
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => false,
            Err(TryLockError::Error(error)) => return Err(error).when("lock it", &path),
        };
        let folder = Self { root: root.to_path_buf(), lock: Some(LockedFile::new(lock)) };
        folder.put_back()?;
        if locked {
            folder.tidy(&[WRITING, REPLACED, REMOVED]).into_iter().next().map_or(Ok(()), Err)?;
        } else {
            // Without a lock, seeming leftovers may belong to another process that is writing now. Writing the same
            // step again replaces them.
            tracing::warn!(
                "{}: this file system has no locks: leftovers of crashed writes are not removed",
                root.display()
            );
        }
        (system.sync)(&folder.root)?;
        Ok(folder)
    }

    /// Restores replaced checkpoints if a crash came before the new one was in place.
    fn put_back(&self) -> Result<(), CheckpointError> {
        for name in self.names()? {
            if let Some(step) = name.strip_prefix(REPLACED)
                && !self.root.join(step).exists()
            {
                rename(&self.root.join(&name), &self.root.join(step))?;
            }
        }
        Ok(())
    }

    /// Removes the folders with these prefixes.
    fn tidy(&self, prefixes: &[&str]) -> Vec<CheckpointError> {
        let names = match self.names() {
            Ok(names) => names,
            Err(error) => return vec![error],
        };
        let left = names.into_iter().filter(|name| prefixes.iter().any(|prefix| name.starts_with(prefix)));
        left.filter_map(|name| remove(&self.root.join(name)).err()).collect()
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The folder of a step's checkpoint.
    pub fn step(&self, step: u64) -> PathBuf {
        self.named("", step)
    }

    /// The folder that it is written to first.
    pub fn writing(&self, step: u64) -> PathBuf {
        self.named(WRITING, step)
    }

    fn named(&self, prefix: &str, step: u64) -> PathBuf {
        self.root.join(format!("{prefix}{STEP}{step:012}"))
    }

    /// The steps of all checkpoints, in order.
    pub fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        let number = |name: &String| {
            // Ranks exchange steps as signed numbers.
            let step = name.strip_prefix(STEP)?.parse().ok().filter(|&step| step <= i64::MAX as u64)?;
            // Only the name that we give to this step counts, not `step-7`, say, whose number lacks the leading zeros.
            (self.step(step).file_name()?.to_str() == Some(name)).then_some(step)
        };
        let mut steps: Vec<u64> = self.names()?.iter().filter_map(number).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// Renames the folder that was written to its final name. An earlier checkpoint of the step is set aside, and
    /// removed by [`remove`](Self::remove); if this fails, it is restored.
    pub fn publish(&self, step: u64) -> Result<(), CheckpointError> {
        let (target, replaced) = (self.step(step), self.named(REPLACED, step));
        let again = target.exists();
        if again {
            remove(&replaced)?;
            rename(&target, &replaced)?;
        }
        if let Err(error) = rename(&self.writing(step), &target) {
            if again {
                rename(&replaced, &target)?;
            }
            return Err(error);
        }
        sync_folder(&self.root)
    }

    /// Removes checkpoints, and leftovers of others. What cannot be removed is tried again next time.
    pub fn remove(&self, steps: &[u64]) -> Vec<CheckpointError> {
        let mut errors = Vec::new();
        for &step in steps {
            // Renamed first, so that a half-removed checkpoint does not look like a whole one.
            let removed = self.named(REMOVED, step);
            errors.extend(remove(&removed).and_then(|()| rename(&self.step(step), &removed)).err());
        }
        errors.extend(self.put_back().err());
        errors.extend(self.tidy(&[REPLACED, REMOVED]));
        errors
    }

    /// Renames a damaged checkpoint, so that it no longer counts.
    pub fn set_damaged_aside(&self, step: u64) -> Result<(), CheckpointError> {
        self.set_aside(DAMAGED, step)
    }

    /// Renames the checkpoints from step `from` on, except `but`, so that they no longer count: the run has gone back
    /// to before them.
    pub fn abandon(&self, from: u64, but: Option<u64>) -> Result<(), CheckpointError> {
        for later in self.steps()?.into_iter().filter(|&later| later >= from && Some(later) != but) {
            tracing::warn!("{}: set aside, because the run went back to an earlier step", self.step(later).display());
            self.set_aside(ABANDONED, later)?;
        }
        Ok(())
    }

    fn set_aside(&self, prefix: &str, step: u64) -> Result<(), CheckpointError> {
        let aside = self.named(prefix, step);
        remove(&aside)?;
        rename(&self.step(step), &aside)
    }

    /// The names of the folders in it.
    fn names(&self) -> Result<Vec<String>, CheckpointError> {
        let entries = match fs::read_dir(&self.root) {
            Err(error) if error.kind() == io::ErrorKind::NotFound && self.lock.is_none() => return Ok(Vec::new()),
            entries => entries.when("list it", &self.root)?,
        };
        let mut names = Vec::new();
        for entry in entries {
            let entry = entry.when("list it", &self.root)?;
            let folder = match entry.file_type() {
                // The writing process has renamed it while this one reads.
                Err(error) if error.kind() == io::ErrorKind::NotFound && self.lock.is_none() => false,
                kind => kind.when("read its metadata", &entry.path())?.is_dir(),
            };
            if folder && let Ok(name) = entry.file_name().into_string() {
                names.push(name);
            }
        }
        Ok(names)
    }
}

/// Creates a folder and its parents, durably: a folder's name is stored in its parent, so each parent is synced.
fn make(root: &Path, sync: fn(&Path) -> Result<(), CheckpointError>) -> Result<(), CheckpointError> {
    let mut made: Vec<&Path> = root.ancestors().take_while(|path| !path.exists()).collect();
    fs::create_dir_all(root).when("make the folder", root)?;
    if made.is_empty() {
        // Another process may have created it and died before it synced the parent.
        made.push(root);
    }
    for path in made.into_iter().rev() {
        match path.parent() {
            Some(above) if above.as_os_str().is_empty() => sync(Path::new("."))?,
            Some(above) => sync(above)?,
            None => {}
        }
    }
    Ok(())
}

/// Removes a folder, if it is there.
fn remove(path: &Path) -> Result<(), CheckpointError> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.when("remove it", path),
    }
}

fn rename(from: &Path, to: &Path) -> Result<(), CheckpointError> {
    fs::rename(from, to).when(format!("rename it to {}", to.display()), from)
}

/// Makes the names in a folder durable, where the system can.
pub(crate) fn sync_folder(path: &Path) -> Result<(), CheckpointError> {
    use io::ErrorKind::{InvalidInput, PermissionDenied, Unsupported};
    if !cfg!(unix) {
        return Ok(());
    }
    match File::open(path).and_then(|folder| folder.sync_all()) {
        // Some file systems cannot sync folders, and a folder without read permission cannot be opened.
        Err(error) if matches!(error.kind(), InvalidInput | Unsupported | PermissionDenied) => Ok(()),
        other => other.when("sync it", path),
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    type Outcome = Result<(), Box<dyn std::error::Error>>;

    const LOCKLESS: System =
        System { lock: |_| Err(TryLockError::Error(io::ErrorKind::Unsupported.into())), sync: sync_folder };

    #[test]
    fn without_locks_a_second_writer_keeps_the_firsts_half_written_step() -> Outcome {
        let root = tempfile::tempdir()?;
        let first = Folder::open_on(root.path(), &LOCKLESS)?;
        fs::create_dir(first.writing(3))?;
        fs::write(first.writing(3).join("model.safetensors"), "half")?;
        // Left by a crash; it is restored even without locks.
        fs::create_dir(first.named(REPLACED, 2))?;
        let second = Folder::open_on(root.path(), &LOCKLESS)?;
        assert!(first.writing(3).join("model.safetensors").is_file());
        assert_eq!(second.steps()?, [2]);
        Ok(())
    }

    #[test]
    fn a_reader_needs_no_lock_and_changes_nothing() -> Outcome {
        let root = tempfile::tempdir()?;
        let path = root.path().join("run");
        let reader = Folder::reading(&path);
        assert!(reader.steps()?.is_empty() && !path.exists());
        let writer = Folder::open(&path)?;
        assert!(matches!(Folder::open(&path), Err(CheckpointError::InUse { .. })));
        fs::create_dir(writer.writing(3))?;
        fs::create_dir(writer.step(2))?;
        assert_eq!(Folder::reading(&path).steps()?, [2]);
        assert!(writer.writing(3).is_dir());
        Ok(())
    }

    #[test]
    fn the_parents_of_a_new_root_are_synced_from_the_outermost_on() -> Outcome {
        thread_local! {
            static SYNCED: RefCell<Vec<PathBuf>> = const { RefCell::new(Vec::new()) };
        }
        let top = tempfile::tempdir()?;
        let system = System {
            lock: File::try_lock,
            sync: |path| {
                assert!(path.is_dir());
                SYNCED.with_borrow_mut(|synced| synced.push(path.to_path_buf()));
                Ok(())
            },
        };
        let (runs, root) = (top.path().join("runs"), top.path().join("runs/mnist"));
        drop(Folder::open_on(&root, &system)?);
        assert_eq!(SYNCED.take(), [top.path().to_path_buf(), runs.clone(), root.clone()]);
        drop(Folder::open_on(&root, &system)?);
        assert_eq!(SYNCED.take(), [runs, root], "its creator may have died before it was synced");
        Ok(())
    }

    #[test]
    fn a_copy_of_the_descriptor_does_not_keep_the_lock() -> Outcome {
        let root = tempfile::tempdir()?;
        let folder = Folder::open(root.path())?;
        // What a child process has between `fork` and `exec`.
        let copy = folder.lock.as_ref().map(|lock| lock.try_clone()).transpose()?;
        drop(folder);
        Folder::open(root.path())?;
        drop(copy);
        Ok(())
    }

    #[test]
    fn a_failed_publish_keeps_the_previous_checkpoint() -> Outcome {
        let root = tempfile::tempdir()?;
        let folder = Folder::open(root.path())?;
        fs::create_dir(folder.step(1))?;
        fs::write(folder.step(1).join("manifest.json"), "old")?;
        assert!(folder.publish(1).is_err(), "nothing was written");
        assert_eq!(fs::read(folder.step(1).join("manifest.json"))?, b"old");
        Ok(())
    }
}
