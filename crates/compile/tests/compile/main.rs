//! Compiled steps beside plain ones.

mod losses;
mod steps;

use std::sync::{Mutex, MutexGuard, PoisonError};

/// Tests that draw numbers run one after the other: libtorch's generator is the process's.
fn alone() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}
