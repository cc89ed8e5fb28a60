//! Notes of what went wrong between ranks. Streams find it while they run, where they cannot lock the world to count
//! it; the next call that locks the world takes the notes over.

use std::sync::{Mutex, PoisonError};

static JOURNAL: Mutex<Vec<(&'static str, String)>> = Mutex::new(Vec::new());

/// Adds a note. `what` is counted.
pub fn leave(what: &'static str, note: String) {
    JOURNAL.lock().unwrap_or_else(PoisonError::into_inner).push((what, note));
}

/// The notes since the last call.
pub fn take() -> Vec<(&'static str, String)> {
    std::mem::take(&mut JOURNAL.lock().unwrap_or_else(PoisonError::into_inner))
}
