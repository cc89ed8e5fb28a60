//! The batches of an epoch, also where they are runs of those that other numbers of ranks have left.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::batches::ParquetBatches;
use super::windows::Windows;
use crate::columns::Table;
use crate::loader::{Lookup, Position};
use crate::{Cancellation, DataError};

/// Batches that follow each other in the order of one rank or another.
pub(super) struct RankWindows {
    runs: Vec<Run>,
    len: usize,
    /// The run that was last asked for a batch.
    current: AtomicUsize,
}

struct Run {
    /// The number of its first batch here, and in its rank's order.
    first: usize,
    first_of_rank: usize,
    windows: Windows,
}

impl RankWindows {
    /// What is left of an epoch at this position.
    pub(super) fn new(batches: &ParquetBatches, position: &Position, pinned: bool) -> Result<Self, DataError> {
        let of_ranks = batches.of_ranks();
        let len = of_ranks.len(&position.earlier);
        let (mut runs, mut first, mut current) = (Vec::new(), 0, 0);
        for (rank, numbers) in of_ranks.runs(&position.earlier, 0..len) {
            let (next, first_of_rank) = (first + numbers.len(), numbers.start);
            let delivered = position.before.range(first..next).map(|number| number - first + first_of_rank);
            let delivered: BTreeSet<usize> = delivered.collect();
            // Earlier ones are substitutes at most.
            let left = first_of_rank + position.batch.clamp(first, next) - first..numbers.end;
            let mut batches = batches.clone();
            batches.rank = rank;
            let windows = Windows::new(batches, position.epoch, left, &delivered, pinned)?;
            current += usize::from(next <= position.batch);
            runs.push(Run { first, first_of_rank, windows });
            first = next;
        }
        Ok(Self { runs, len, current: AtomicUsize::new(current) })
    }

    /// The runs that are read ahead: the current one and the next.
    fn ahead(&self) -> impl Iterator<Item = &Windows> {
        self.runs.iter().skip(self.current.load(Relaxed)).take(2).map(|run| &run.windows)
    }
}

impl Lookup for RankWindows {
    type Sample = Table;

    fn len(&self) -> usize {
        self.len
    }

    fn key(&self, _number: usize) -> Option<String> {
        None
    }

    fn get(&self, number: usize, is_substitute: bool, cancelled: &Cancellation) -> Result<Table, DataError> {
        let current = self.runs.partition_point(|run| run.first <= number).saturating_sub(1);
        let Some(run) = self.runs.get(current) else {
            return Err(DataError::IndexOutOfRange { index: number, len: self.len });
        };
        if !is_substitute {
            self.current.fetch_max(current, Relaxed);
        }
        run.windows.get(number - run.first + run.first_of_rank, is_substitute, cancelled)
    }

    fn read_ahead(&self, cancelled: &Cancellation) -> bool {
        self.ahead().any(|windows| windows.read_ahead(cancelled))
    }

    fn parts_ahead(&self) -> usize {
        self.ahead().map(Windows::parts_ahead).sum()
    }

    fn shared_by(&self, workers: usize) {
        self.runs.iter().for_each(|run| run.windows.shared_by(workers));
    }
}
