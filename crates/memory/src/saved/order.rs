//! The order in which tensors were stored.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// Tensors by the order in which they were stored; the backward pass asks for the last ones first.
pub(super) struct Order<T>(Mutex<Stored<T>>);

struct Stored<T> {
    tensors: BTreeMap<u64, Weak<T>>,
    next: u64,
}

impl<T> Order<T> {
    fn lock(&self) -> MutexGuard<'_, Stored<T>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores what `make` makes of its place. It calls [`remove`](Self::remove) when it is dropped.
    pub(super) fn push(&self, make: impl FnOnce(u64) -> T) -> Arc<T> {
        let mut stored = self.lock();
        let place = stored.next;
        stored.next += 1;
        let made = Arc::new(make(place));
        stored.tensors.insert(place, Arc::downgrade(&made));
        made
    }

    pub(super) fn remove(&self, place: u64) {
        self.lock().tensors.remove(&place);
    }

    /// Those that were stored before the one at this place, the last first.
    pub(super) fn before(&self, place: u64, count: usize) -> Vec<Weak<T>> {
        self.lock().tensors.range(..place).rev().take(count).map(|(_, tensor)| tensor.clone()).collect()
    }
}

impl<T> Default for Order<T> {
    fn default() -> Self {
        Self(Mutex::new(Stored { tensors: BTreeMap::new(), next: 0 }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn those_before_are_the_last_ones_that_live_and_the_others_leave_nothing() {
        let order = Order::default();
        let stored: Vec<_> = (0..5).map(|_| order.push(|place| place)).collect();
        order.remove(3);
        let before = order.before(4, 2);
        assert_eq!(before.iter().map(|it| *it.upgrade().unwrap()).collect::<Vec<_>>(), [2, 1]);
        (0..5).for_each(|place| order.remove(place));
        assert!(order.lock().tensors.is_empty() && order.before(4, 2).is_empty());
        assert_eq!(*order.push(|place| place), 5, "places are not used again while tensors of before may live");
        drop(stored);
    }
}
