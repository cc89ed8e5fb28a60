//! A small cache of the values that were used last.

use std::sync::{Arc, Mutex, PoisonError};

use crate::DataError;

/// A cached value, or one in the making: locked meanwhile, so that other threads wait for it.
type Slot<V> = Arc<Mutex<Option<Arc<V>>>>;

/// The values that were used last, the latest at the end.
pub(crate) struct Recent<K, V> {
    keep: usize,
    slots: Mutex<Vec<(K, Slot<V>)>>,
}

impl<K: PartialEq, V> Recent<K, V> {
    pub(crate) fn new(keep: usize) -> Self {
        Self { keep, slots: Mutex::default() }
    }

    /// The value of `key`, from `make` if it is not cached. A failure is not cached.
    pub(crate) fn get(&self, key: K, make: impl FnOnce() -> Result<V, DataError>) -> Result<Arc<V>, DataError> {
        let slot = self.slot(key);
        let mut value = slot.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(value) = &*value {
            return Ok(value.clone());
        }
        let new = Arc::new(make()?);
        *value = Some(new.clone());
        Ok(new)
    }

    fn slot(&self, key: K) -> Slot<V> {
        let mut slots = self.slots.lock().unwrap_or_else(PoisonError::into_inner);
        let position = slots.iter().position(|(kept, _)| *kept == key);
        let slot = position.map_or_else(Arc::default, |position| slots.remove(position).1);
        slots.push((key, slot.clone()));
        let surplus = slots.len().saturating_sub(self.keep);
        slots.drain(..surplus);
        slot
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
    }
}
