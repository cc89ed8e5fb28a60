//! Puts numbered items that arrive in any order back in line.

use std::collections::VecDeque;

/// Holds items until those before them have been taken.
pub(crate) struct Reorder<T> {
    /// The number of the front slot, which is the next to be taken.
    next: usize,
    slots: VecDeque<Option<T>>,
}

impl<T> Reorder<T> {
    pub(crate) fn new() -> Self {
        Self { next: 0, slots: VecDeque::new() }
    }

    /// The number of the item that is due.
    pub(crate) fn due(&self) -> usize {
        self.next
    }

    /// Stores the item with this number, which has not been taken yet.
    pub(crate) fn put(&mut self, number: usize, item: T) {
        let slot = number - self.next;
        if slot >= self.slots.len() {
            self.slots.resize_with(slot + 1, || None);
        }
        self.slots[slot] = Some(item);
    }

    /// Takes the item that is due, if it has arrived.
    pub(crate) fn take(&mut self) -> Option<T> {
        let item = self.slots.front_mut()?.take()?;
        self.slots.pop_front();
        self.next += 1;
        Some(item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_leave_in_order() {
        let mut line = Reorder::new();
        let mut left = Vec::new();
        for number in [2, 0, 1, 4, 5, 3, 6] {
            line.put(number, number);
            left.extend(std::iter::from_fn(|| line.take()));
        }
        assert_eq!(left, [0, 1, 2, 3, 4, 5, 6]);
        assert_eq!((line.due(), line.slots.len()), (7, 0));
    }
}
