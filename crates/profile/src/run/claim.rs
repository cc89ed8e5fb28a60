//! The record that `overdrive-profile run` asks its program for.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::ProfileError;

/// Whether a timer of this process records for it. There is one profiler in a process.
static TAKEN: AtomicBool = AtomicBool::new(false);

/// The right to record, which one timer has at a time.
#[derive(Debug)]
pub(crate) struct Claim {
    folder: OsString,
    /// Counts within the process.
    number: u32,
}

impl Claim {
    /// None where nobody asks for a record, another timer is at it, or one has been made.
    pub fn take() -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let may_be_asked = cfg!(feature = "record");
        let folder = std::env::var_os("OVERDRIVE_PROFILE").filter(|folder| may_be_asked && !folder.is_empty())?;
        let is_free = !TAKEN.swap(true, Ordering::Relaxed);
        is_free.then(|| Self { folder, number: NEXT.fetch_add(1, Ordering::Relaxed) })
    }

    pub fn folder(&self) -> PathBuf {
        PathBuf::from(&self.folder)
    }

    /// Tells the files of this record from those of other processes and timers in the folder.
    pub fn label(&self) -> String {
        format!("{}-{}", std::process::id(), self.number)
    }

    /// A count of steps that is asked for.
    pub fn steps(name: &'static str) -> Result<Option<u64>, ProfileError> {
        let Ok(value) = std::env::var(name) else { return Ok(None) };
        value.parse().map(Some).map_err(|_| {
            let problem = "should be a count of steps".to_owned();
            ProfileError::Setting { name, value, problem }
        })
    }

    /// The record is what was asked for: no other timer needs to make one.
    pub fn keep(self) {
        std::mem::forget(self);
    }
}

/// Another timer may record.
impl Drop for Claim {
    fn drop(&mut self) {
        TAKEN.store(false, Ordering::Relaxed);
    }
}
