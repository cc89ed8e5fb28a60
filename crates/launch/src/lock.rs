//! Locks.

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Locks also what a thread held while it panicked: what is locked here stays usable.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
