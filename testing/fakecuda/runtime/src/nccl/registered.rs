//! Memory that is registered at a communicator.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Ranges of addresses by their handles, which are never 0.
#[derive(Default)]
pub struct Registered(Mutex<BTreeMap<usize, Range<usize>>>);

impl Registered {
    fn open(&self) -> MutexGuard<'_, BTreeMap<usize, Range<usize>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The handle; None if a part of the memory is registered already, which NCCL would only count.
    pub fn add(&self, memory: Range<usize>) -> Option<usize> {
        let mut all = self.open();
        if all.values().any(|other| other.start < memory.end && memory.start < other.end) {
            return None;
        }
        let handle = all.last_key_value().map_or(1, |(last, _)| last + 1);
        all.insert(handle, memory);
        Some(handle)
    }

    /// Whether there was such a handle.
    pub fn remove(&self, handle: usize) -> bool {
        self.open().remove(&handle).is_some()
    }

    pub fn has(&self, address: usize) -> bool {
        self.open().values().any(|memory| memory.contains(&address))
    }
}
