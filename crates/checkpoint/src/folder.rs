//! The folder of checkpoints: names, what a crash may have left, and what is removed when.
//!
//! | name | what it is |
//! |---|---|
//! | `step-N` | a checkpoint |
//! | `.writing-step-N` | one that is being written |
//! | `.replaced-step-N` | one whose step was saved again: put back after a crash before the new one was in place |
//! | `.removed-step-N` | one that is being removed |
//! | `damaged-step-N` | one that could not be loaded, and is left to be looked at |
//! | `abandoned-step-N` | one of a run that was taken back to an earlier step and went on from there |

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

use crate::error::{CheckpointError, Context};

const STEP: &str = "step-";
const WRITING: &str = ".writing-";
const REPLACED: &str = ".replaced-";
const REMOVED: &str = ".removed-";
const DAMAGED: &str = "damaged-";
const ABANDONED: &str = "abandoned-";

/// A folder that this run alone writes to.
#[derive(Debug)]
pub(crate) struct Folder {
    root: PathBuf,
    /// Locked as long as it is open, and no longer when the process is gone.
    _lock: File,
}

impl Folder {
    /// Makes the folder where there is none, and tidies up after a crash.
    pub fn open(root: &Path) -> Result<Self, CheckpointError> {
        fs::create_dir_all(root).when("make the folder", root)?;
        let path = root.join(".lock");
        let lock = File::options().create(true).truncate(false).write(true).open(&path).when("open it", &path)?;
        match lock.try_lock() {
            Err(TryLockError::WouldBlock) => return Err(CheckpointError::InUse { folder: root.to_path_buf() }),
            // A network's file system may have none.
            Err(TryLockError::Error(error)) if error.kind() == io::ErrorKind::Unsupported => {}
            Err(TryLockError::Error(error)) => return Err(error).when("lock it", &path),
            Ok(()) => {}
        }
        let folder = Self { root: root.to_path_buf(), _lock: lock };
        folder.recover()?;
        Ok(folder)
    }

    fn recover(&self) -> Result<(), CheckpointError> {
        for name in names(&self.root)? {
            let path = self.root.join(&name);
            if let Some(step) = name.strip_prefix(REPLACED)
                && !self.root.join(step).exists()
            {
                rename(&path, &self.root.join(step))?;
            } else if [WRITING, REPLACED, REMOVED].iter().any(|prefix| name.starts_with(prefix)) {
                fs::remove_dir_all(&path).when("remove it", &path)?;
            }
        }
        sync_folder(&self.root)
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Where the checkpoint of a step lies.
    pub fn step(&self, step: u64) -> PathBuf {
        self.named("", step)
    }

    /// Where it is written first.
    pub fn writing(&self, step: u64) -> PathBuf {
        self.named(WRITING, step)
    }

    fn named(&self, prefix: &str, step: u64) -> PathBuf {
        self.root.join(format!("{prefix}{STEP}{step:012}"))
    }

    /// The steps of all checkpoints, in order.
    pub fn steps(&self) -> Result<Vec<u64>, CheckpointError> {
        let number = |name: &String| {
            let step = name.strip_prefix(STEP)?.parse().ok()?;
            // Under another spelling it is nobody's.
            (self.step(step).file_name()?.to_str() == Some(name)).then_some(step)
        };
        let mut steps: Vec<u64> = names(&self.root)?.iter().filter_map(number).collect();
        steps.sort_unstable();
        Ok(steps)
    }

    /// Puts what was written aside under its name, in place of what may be there.
    pub fn publish(&self, step: u64) -> Result<(), CheckpointError> {
        let (target, replaced) = (self.step(step), self.named(REPLACED, step));
        let again = target.exists();
        if again {
            rename(&target, &replaced)?;
        }
        rename(&self.writing(step), &target)?;
        sync_folder(&self.root)?;
        if again {
            fs::remove_dir_all(&replaced).when("remove it", &replaced)?;
        }
        Ok(())
    }

    /// Leaves the `keep` checkpoints of the highest steps, and `newest` in any case.
    pub fn remove_oldest(&self, keep: usize, newest: u64) -> Result<(), CheckpointError> {
        let steps = self.steps()?;
        let surplus = steps.len().saturating_sub(keep);
        for &step in steps.iter().filter(|&&step| step != newest).take(surplus) {
            // Under another name first: half of a checkpoint must not look like one.
            let removed = self.named(REMOVED, step);
            rename(&self.step(step), &removed)?;
            fs::remove_dir_all(&removed).when("remove it", &removed)?;
        }
        Ok(())
    }

    /// Puts a checkpoint that cannot be loaded where it does not count.
    pub fn set_damaged_aside(&self, step: u64) -> Result<(), CheckpointError> {
        self.set_aside(DAMAGED, step)
    }

    /// Puts checkpoints of later steps where they do not count: the run that goes on at `step` did not come by them.
    pub fn abandon_later(&self, step: u64) -> Result<(), CheckpointError> {
        for later in self.steps()?.into_iter().filter(|&later| later > step) {
            tracing::warn!("{}: set aside, because the run went back to before it", self.step(later).display());
            self.set_aside(ABANDONED, later)?;
        }
        Ok(())
    }

    fn set_aside(&self, prefix: &str, step: u64) -> Result<(), CheckpointError> {
        let aside = self.named(prefix, step);
        if aside.exists() {
            fs::remove_dir_all(&aside).when("remove it", &aside)?;
        }
        rename(&self.step(step), &aside)
    }
}

fn names(root: &Path) -> Result<Vec<String>, CheckpointError> {
    let entries = fs::read_dir(root).when("list it", root)?;
    let mut names = Vec::new();
    for entry in entries {
        let entry = entry.when("list it", root)?;
        if entry.file_type().when("look at it", &entry.path())?.is_dir()
            && let Ok(name) = entry.file_name().into_string()
        {
            names.push(name);
        }
    }
    Ok(names)
}

fn rename(from: &Path, to: &Path) -> Result<(), CheckpointError> {
    fs::rename(from, to).when(format!("rename it to {}", to.display()), from)
}

/// Makes names last, where the system can: a name is the folder's content.
pub(crate) fn sync_folder(path: &Path) -> Result<(), CheckpointError> {
    if !cfg!(unix) {
        return Ok(());
    }
    match File::open(path).and_then(|folder| folder.sync_all()) {
        // Some file systems have no such call for folders.
        Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => Ok(()),
        other => other.when("sync it", path),
    }
}
