//! Vector clocks over streams, and the accesses that they order.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

/// For each stream, how many of its operations are known to be done before.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Clock(BTreeMap<u64, u64>);

impl Clock {
    /// Whether the operation of this number is done before.
    pub fn has_seen(&self, stream: u64, operation: u64) -> bool {
        self.0.get(&stream).is_some_and(|seen| *seen >= operation)
    }

    /// The stream's own operations go on to this number.
    pub fn set(&mut self, stream: u64, operation: u64) {
        self.0.insert(stream, operation);
    }

    /// Knows what the other knows, too.
    pub fn join(&mut self, other: &Self) {
        for (stream, operation) in &other.0 {
            let own = self.0.entry(*stream).or_default();
            *own = (*own).max(*operation);
        }
    }
}

/// Bytes that an operation reads or writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Access {
    /// Addresses.
    pub bytes: Range<usize>,
    /// Whether it writes.
    pub writes: bool,
}

/// An access without an order to another one of the same bytes, of which one writes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Race {
    /// What both touch.
    pub bytes: Range<usize>,
    /// The operation that came first here, and that which came second: what it is, its stream, and whether it writes.
    pub operations: [(String, u64, bool); 2],
}

impl fmt::Display for Race {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [first, second] = self.operations.each_ref().map(|(what, stream, writes)| {
            format!("{what} of stream {stream:#x} {}", if *writes { "writes" } else { "reads" })
        });
        write!(to, "{second} what {first}: {} bytes, not ordered", self.bytes.len())
    }
}

/// The accesses since the host last waited for everything.
#[derive(Debug, Default)]
pub struct Accesses(Vec<(Access, u64, u64, String)>);

impl Accesses {
    /// Notes the accesses of an operation, and returns its races. `clock`: what is known to be done before it.
    pub fn note(
        &mut self,
        (stream, operation): (u64, u64),
        what: &str,
        accesses: &[Access],
        clock: &Clock,
    ) -> Vec<Race> {
        let mut races = Vec::new();
        for new in accesses.iter().filter(|it| !it.bytes.is_empty()) {
            for (old, other, number, other_what) in &self.0 {
                let bytes = old.bytes.start.max(new.bytes.start)..old.bytes.end.min(new.bytes.end);
                let is_ordered = *other == stream || clock.has_seen(*other, *number);
                if is_ordered || bytes.is_empty() || !(old.writes || new.writes) {
                    continue;
                }
                let operations = [(other_what.clone(), *other, old.writes), (what.to_owned(), stream, new.writes)];
                races.push(Race { bytes, operations });
            }
        }
        let own = accesses.iter().map(|access| (access.clone(), stream, operation, what.to_owned()));
        self.0.extend(own);
        races
    }

    /// Forgets the accesses that everything from now on comes after.
    pub fn forget(&mut self, host: &Clock) {
        self.0.retain(|(_, stream, operation, _)| !host.has_seen(*stream, *operation));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn access(bytes: Range<usize>, writes: bool) -> [Access; 1] {
        [Access { bytes, writes }]
    }

    #[test]
    fn what_is_not_ordered_and_overlaps_is_a_race() {
        let (mut accesses, mut clock) = (Accesses::default(), Clock::default());
        assert_eq!(accesses.note((1, 1), "copy", &access(0..8, true), &Clock::default()), []);
        assert_eq!(accesses.note((1, 2), "its own stream", &access(0..8, true), &Clock::default()), []);
        assert_eq!(accesses.note((2, 1), "other bytes", &access(8..16, false), &Clock::default()), []);
        let races = accesses.note((2, 2), "kernel", &access(4..12, false), &clock);
        assert_eq!(races.len(), 2);
        assert_eq!(races[0].bytes, 4..8);
        assert_eq!(races[0].operations, [("copy".to_owned(), 1, true), ("kernel".to_owned(), 2, false)]);
        clock.set(1, 1);
        assert_eq!(accesses.note((2, 3), "after the first", &access(0..8, false), &clock).len(), 1);
        clock.set(1, 2);
        assert_eq!(accesses.note((2, 4), "after both", &access(0..8, true), &clock), []);
    }

    #[test]
    fn two_that_read_are_no_race_and_those_before_a_wait_are_forgotten() {
        let (mut accesses, mut host) = (Accesses::default(), Clock::default());
        accesses.note((1, 1), "read", &access(0..8, false), &Clock::default());
        assert_eq!(accesses.note((2, 1), "read", &access(0..8, false), &Clock::default()), []);
        host.set(1, 1);
        accesses.forget(&host);
        let races = accesses.note((3, 1), "write", &access(0..8, true), &Clock::default());
        assert_eq!(races.len(), 1, "that of stream 2 alone");
        assert_eq!(races[0].operations[0].1, 2);
    }

    #[test]
    fn a_clock_that_joins_knows_the_later_of_both() {
        let (mut one, mut other) = (Clock::default(), Clock::default());
        one.set(1, 5);
        other.set(1, 3);
        other.set(2, 7);
        one.join(&other);
        assert!(one.has_seen(1, 5) && one.has_seen(2, 7) && !one.has_seen(1, 6) && !one.has_seen(3, 1));
    }
}
