//! The order in which tensors were stored.

use std::sync::{Arc, Mutex, PoisonError, Weak};

/// Tensors in the order in which they were stored; the backward pass asks for the last ones first.
pub(super) struct Order<T>(Mutex<Vec<Weak<T>>>);

impl<T> Order<T> {
    /// Stores what `make` makes of its place.
    pub(super) fn push(&self, make: impl FnOnce(usize) -> T) -> Arc<T> {
        let mut stored = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        while stored.last().is_some_and(|last| last.strong_count() == 0) {
            stored.pop();
        }
        let made = Arc::new(make(stored.len()));
        stored.push(Arc::downgrade(&made));
        made
    }

    /// Those that were stored before the one at this place, the last first.
    pub(super) fn before(&self, place: usize, count: usize) -> Vec<Weak<T>> {
        let stored = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        stored[..place].iter().rev().take(count).cloned().collect()
    }
}

impl<T> Default for Order<T> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}
