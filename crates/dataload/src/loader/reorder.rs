//! Puts numbered items that arrive in any order back into order.

use std::collections::VecDeque;

/// Holds items until all earlier ones have been taken.
pub(crate) struct Reorder<T> {
    /// The number of the front slot, which is the next to be taken.
    next: usize,
    slots: VecDeque<Option<T>>,
    waiting: usize,
}

impl<T> Reorder<T> {
    pub(crate) fn starting_at(first: usize) -> Self {
        Self { next: first, slots: VecDeque::new(), waiting: 0 }
    }

    /// The number of the next item to be taken.
    pub(crate) fn due(&self) -> usize {
        self.next
    }

    /// How many items are here.
    pub(crate) fn waiting(&self) -> usize {
        self.waiting
    }

    /// Stores item `number`, which must not have been taken yet.
    pub(crate) fn put(&mut self, number: usize, item: T) {
        let slot = number - self.next;
        if slot >= self.slots.len() {
            self.slots.resize_with(slot + 1, || None);
        }
        self.slots[slot] = Some(item);
        self.waiting += 1;
    }

    /// Takes the next item, if it has arrived.
    pub(crate) fn take(&mut self) -> Option<T> {
        let item = self.slots.front_mut()?.take()?;
        self.slots.pop_front();
        self.next += 1;
        self.waiting -= 1;
        Some(item)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_leave_in_order() {
        let mut line = Reorder::starting_at(10);
        let mut left = Vec::new();
        for number in [12, 10, 11, 14, 15, 13, 16] {
            line.put(number, number);
            left.extend(std::iter::from_fn(|| line.take()));
        }
        assert_eq!(left, [10, 11, 12, 13, 14, 15, 16]);
        assert_eq!((line.due(), line.waiting(), line.slots.len()), (17, 0, 0));
    }
}
