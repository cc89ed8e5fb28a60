//! The right to record for `overdrive-profile run`.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::ProfileError;

/// Whether a timer of this process holds the claim. Only one can, because a process has only one profiler.
static TAKEN: AtomicBool = AtomicBool::new(false);
/// How many other timers have asked for the claim since.
static REFUSED: AtomicU32 = AtomicU32::new(0);
/// Enough for a program that makes a timer for each epoch.
const MOST_RECORDS: u32 = 16;

/// The note of a record whose program marks no phases. Comparisons look for this exact text, also in stored records.
pub(crate) const NO_STEP_TIMER: &str = "the program has no StepTimer: its steps are told by loaders and optimizers, and what \
     is neither data wait, nor an optimizer, nor a backward pass of DDP or an accumulator is `other`, the forward pass among it";

/// The right to record, which one timer has at a time.
#[derive(Debug)]
pub(crate) struct Claim {
    folder: OsString,
    /// Its number within the process.
    number: u32,
}

impl Claim {
    /// None if no record was asked for, if another timer records, or after [`MOST_RECORDS`] records.
    pub fn take() -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let is_enabled = cfg!(feature = "record");
        let folder = std::env::var_os("OVERDRIVE_PROFILE").filter(|folder| is_enabled && !folder.is_empty())?;
        if TAKEN.swap(true, Ordering::Relaxed) {
            REFUSED.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        REFUSED.store(0, Ordering::Relaxed);
        // If there are too many records, this drops the claim and frees its slot.
        let claim = Self { folder, number: NEXT.fetch_add(1, Ordering::Relaxed) };
        (claim.number < MOST_RECORDS).then_some(claim)
    }

    pub fn folder(&self) -> PathBuf {
        PathBuf::from(&self.folder)
    }

    /// A part of the record's file names that differs from other processes' and timers'.
    pub fn label(&self) -> String {
        format!("{}-{}", std::process::id(), self.number)
    }

    /// A number of steps in an environment variable.
    pub fn steps(name: &'static str) -> Result<Option<u64>, ProfileError> {
        let Ok(value) = std::env::var(name) else { return Ok(None) };
        value.parse().map(Some).map_err(|_| {
            let problem = "should be a number of steps".to_owned();
            ProfileError::Setting { name, value, problem }
        })
    }

    /// A note about the timers that were not recorded because of this one.
    pub fn refused_note(&self) -> Option<String> {
        let others = REFUSED.load(Ordering::Relaxed);
        (others > 0).then(|| {
            format!(
                "{others} more of this process's step timers or training threads were not recorded, because one is \
                 recorded at a time"
            )
        })
    }
}

/// Lets another timer record.
impl Drop for Claim {
    fn drop(&mut self) {
        TAKEN.store(false, Ordering::Relaxed);
    }
}
