//! The batches of an epoch, also where they are parts of those that other numbers of ranks have left.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::batches::ParquetBatches;
use super::windows::Windows;
use crate::columns::Table;
use crate::loader::{Lookup, Position};
use crate::{Cancellation, DataError};

/// Batches that follow each other in the order of one rank or another.
pub(super) struct PartWindows {
    parts: Vec<Part>,
    len: usize,
    /// The part that was last asked for a batch.
    current: AtomicUsize,
}

struct Part {
    /// The number of its first batch here, and in its rank's order.
    first: usize,
    first_of_rank: usize,
    windows: Windows,
}

impl PartWindows {
    /// What is left of an epoch at this position.
    pub(super) fn new(batches: &ParquetBatches, position: &Position, pinned: bool) -> Result<Self, DataError> {
        let of_ranks = batches.of_ranks();
        let len = of_ranks.len(&position.earlier);
        let (mut parts, mut first, mut current) = (Vec::new(), 0, 0);
        for (rank, numbers) in of_ranks.parts(&position.earlier, 0..len) {
            let (next, first_of_rank) = (first + numbers.len(), numbers.start);
            let delivered = position.before.range(first..next).map(|number| number - first + first_of_rank);
            let delivered: BTreeSet<usize> = delivered.collect();
            // Earlier ones are substitutes at most.
            let left = first_of_rank + position.batch.clamp(first, next) - first..numbers.end;
            let mut batches = batches.clone();
            batches.rank = rank;
            let windows = Windows::new(batches, position.epoch, left, &delivered, pinned)?;
            current += usize::from(next <= position.batch);
            parts.push(Part { first, first_of_rank, windows });
            first = next;
        }
        Ok(Self { parts, len, current: AtomicUsize::new(current) })
    }

    /// The parts that are read ahead: the current one and the next.
    fn ahead(&self) -> impl Iterator<Item = &Windows> {
        self.parts.iter().skip(self.current.load(Relaxed)).take(2).map(|part| &part.windows)
    }
}

impl Lookup for PartWindows {
    type Sample = Table;

    fn len(&self) -> usize {
        self.len
    }

    fn key(&self, _number: usize) -> Option<String> {
        None
    }

    fn get(&self, number: usize, is_substitute: bool, cancelled: &Cancellation) -> Result<Table, DataError> {
        let current = self.parts.partition_point(|part| part.first <= number).saturating_sub(1);
        let Some(part) = self.parts.get(current) else {
            return Err(DataError::IndexOutOfRange { index: number, len: self.len });
        };
        if !is_substitute {
            self.current.fetch_max(current, Relaxed);
        }
        part.windows.get(number - part.first + part.first_of_rank, is_substitute, cancelled)
    }

    fn read_ahead(&self, cancelled: &Cancellation) -> bool {
        self.ahead().any(|windows| windows.read_ahead(cancelled))
    }

    fn parts_ahead(&self) -> usize {
        self.ahead().map(Windows::parts_ahead).sum()
    }

    fn shared_by(&self, workers: usize) {
        self.parts.iter().for_each(|part| part.windows.shared_by(workers));
    }
}
