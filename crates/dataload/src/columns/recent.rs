//! A small cache of the values that were used last.

use std::sync::{Arc, Mutex, PoisonError};

use crate::DataError;

/// A cached value, or one in the making: locked meanwhile, so that other threads wait for it.
pub(crate) struct Slot<V>(Arc<Mutex<Option<Arc<V>>>>);

impl<V> Clone for Slot<V> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<V> Slot<V> {
    /// The value, from `make` if there is none yet. A failure is not cached.
    pub(crate) fn get(&self, make: impl FnOnce() -> Result<V, DataError>) -> Result<Arc<V>, DataError> {
        let mut value = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = &*value {
            return Ok(value.clone());
        }
        let new = Arc::new(make()?);
        *value = Some(new.clone());
        Ok(new)
    }
}

/// The values that were used last, the latest at the end.
pub(crate) struct Recent<K, V> {
    keep: usize,
    slots: Mutex<Vec<(K, Slot<V>)>>,
}

impl<K: PartialEq, V> Recent<K, V> {
    pub(crate) fn new(keep: usize) -> Self {
        Self { keep, slots: Mutex::default() }
    }

    /// The value of `key`, from `make` if it is not cached, as [`Slot::get`].
    pub(crate) fn get(&self, key: K, make: impl FnOnce() -> Result<V, DataError>) -> Result<Arc<V>, DataError> {
        self.slot(key).0.get(make)
    }

    /// A slot for the value of `key`, to be filled by a thread that may run late; `None` where there is one already.
    pub(crate) fn reserve(&self, key: K) -> Option<Slot<V>> {
        let (slot, is_new) = self.slot(key);
        is_new.then_some(slot)
    }

    /// The slot of `key`, and whether it was made now.
    fn slot(&self, key: K) -> (Slot<V>, bool) {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let position = slots.iter().position(|(kept, _)| *kept == key);
        let slot = position.map_or_else(|| Slot(Arc::default()), |position| slots.remove(position).1);
        slots.push((key, slot.clone()));
        let surplus = slots.len().saturating_sub(self.keep);
        slots.drain(..surplus);
        (slot, position.is_none())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_latest_are_kept_and_failures_are_not() {
        let recent = Recent::new(2);
        let get = |key: u8, value: u8| recent.get(key, || Ok(value)).map(|value| *value).unwrap();
        assert_eq!((get(1, 10), get(2, 20), get(1, 11), get(3, 30), get(2, 21), get(3, 31)), (10, 20, 10, 30, 21, 30));
        assert!(recent.get(9, || Err(DataError::EmptyBatch)).is_err());
        assert_eq!(get(9, 90), 90);
        // A reserved slot is filled once, also when it is not kept any more.
        let slot = recent.reserve(5).unwrap();
        assert!(recent.reserve(5).is_none());
        assert_eq!((get(5, 50), get(6, 60), get(7, 70)), (50, 60, 70));
        assert_eq!(slot.get(|| Ok(51)).map(|value| *value).unwrap(), 50);
    }
}
