//! The record that `overdrive-profile run` asks its program for.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use crate::ProfileError;

/// Whether a timer of this process records for it. There is one profiler in a process.
static TAKEN: AtomicBool = AtomicBool::new(false);
/// How many others have wanted to since.
static REFUSED: AtomicU32 = AtomicU32::new(0);
/// A program that makes a timer for each epoch has enough of them profiled.
const MOST_RECORDS: u32 = 16;

/// The note of a record whose program marks no phases.
pub(crate) const NO_STEP_TIMER: &str = "the program has no StepTimer: its steps are told by loaders and optimizers, and what \
     is neither data wait, nor an optimizer, nor a backward pass of DDP or an accumulator is `other`, the forward pass among it";

/// The right to record, which one timer has at a time.
#[derive(Debug)]
pub(crate) struct Claim {
    folder: OsString,
    /// Counts within the process.
    number: u32,
}

impl Claim {
    /// None where nobody asks for a record, another timer is at it, or enough have been.
    pub fn take() -> Option<Self> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let may_be_asked = cfg!(feature = "record");
        let folder = std::env::var_os("OVERDRIVE_PROFILE").filter(|folder| may_be_asked && !folder.is_empty())?;
        if TAKEN.swap(true, Ordering::Relaxed) {
            REFUSED.fetch_add(1, Ordering::Relaxed);
            return None;
        }
        REFUSED.store(0, Ordering::Relaxed);
        // Gives the place free again where it is one too many.
        let claim = Self { folder, number: NEXT.fetch_add(1, Ordering::Relaxed) };
        (claim.number < MOST_RECORDS).then_some(claim)
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

    /// Says how many other timers there were meanwhile, which are not recorded.
    pub fn others(&self) -> Option<String> {
        let others = REFUSED.load(Ordering::Relaxed);
        (others > 0).then(|| {
            format!(
                "{others} more of this process wanted to be recorded meanwhile, step timers or threads that train: one is recorded \
                 at a time"
            )
        })
    }
}

/// Another timer may record.
impl Drop for Claim {
    fn drop(&mut self) {
        TAKEN.store(false, Ordering::Relaxed);
    }
}
