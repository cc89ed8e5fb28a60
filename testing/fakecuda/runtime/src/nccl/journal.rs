//! What went wrong between ranks. It is found while the streams are at work, where the world's counts are out of reach;
//! the next call that locks the world takes it over.

use std::sync::{Mutex, PoisonError};

static JOURNAL: Mutex<Vec<(&'static str, String)>> = Mutex::new(Vec::new());

/// Leaves a note; `what` is counted.
pub fn leave(what: &'static str, note: String) {
    JOURNAL.lock().unwrap_or_else(PoisonError::into_inner).push((what, note));
}

/// The notes since the last call.
pub fn take() -> Vec<(&'static str, String)> {
    std::mem::take(&mut JOURNAL.lock().unwrap_or_else(PoisonError::into_inner))
}
