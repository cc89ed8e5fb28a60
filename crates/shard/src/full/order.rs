//! The order in which units are used, learnt from the last pass: which one to gather ahead.

use std::collections::HashMap;

use super::meeting::Event;

#[derive(Debug, Default)]
pub(super) struct Order {
    last: Option<Event>,
    /// The unit that came after this one, in the same direction.
    after: HashMap<(bool, usize), usize>,
}

fn place(event: Event) -> Option<(bool, usize)> {
    match event {
        Event::Forward(unit) => Some((true, unit)),
        Event::Backward(unit) => Some((false, unit)),
        _ => None,
    }
}

impl Order {
    /// The unit that came after this event the last time.
    pub(super) fn next(&self, event: Event) -> Option<usize> {
        let place = place(event)?;
        self.after.get(&place).copied().filter(|next| *next != place.1)
    }

    pub(super) fn record(&mut self, event: Event) {
        let Some((is_forward, unit)) = place(event) else { return };
        if let Some(before) = self.last.and_then(place) {
            match before.0 == is_forward {
                true => drop(self.after.insert(before, unit)),
                // It was the last one of its pass.
                false => drop(self.after.remove(&before)),
            }
        }
        self.last = Some(event);
    }

    /// The parameters change: what comes next begins anew.
    pub(super) fn cut(&mut self) {
        if let Some(before) = self.last.take().and_then(place) {
            self.after.remove(&before);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Event::{Backward, Forward, Recompute};
    use super::*;

    #[test]
    fn the_next_unit_is_that_of_the_last_pass() {
        let mut order = Order::default();
        let pass = [Forward(0), Forward(1), Forward(2), Backward(2), Recompute(1), Backward(1), Backward(0)];
        pass.iter().for_each(|event| order.record(*event));
        order.cut();
        let next = |event| order.next(event);
        assert_eq!([Forward(0), Forward(1), Forward(2)].map(next), [Some(1), Some(2), None]);
        assert_eq!([Backward(2), Backward(1), Backward(0), Recompute(1)].map(next), [Some(1), Some(0), None, None]);
    }

    #[test]
    fn another_order_is_learnt() {
        let mut order = Order::default();
        for pass in [[Forward(0), Forward(1), Forward(2)], [Forward(0), Forward(2), Forward(1)]] {
            pass.iter().for_each(|event| order.record(*event));
            order.cut();
        }
        assert_eq!([0, 1, 2].map(|unit| order.next(Forward(unit))), [Some(2), None, Some(1)]);
    }

    #[test]
    fn a_unit_that_is_used_twice_in_a_row_is_not_its_own_next() {
        let mut order = Order::default();
        [Forward(0), Forward(0)].iter().for_each(|event| order.record(*event));
        assert_eq!(order.next(Forward(0)), None);
    }
}
