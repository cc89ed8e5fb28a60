//! The batches of an epoch, also where they are runs of those that other numbers of ranks have left.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

use super::batches::ParquetBatches;
use super::windows::Windows;
use crate::columns::Table;
use crate::loader::{Lookup, Position};
use crate::rank::Rank;
use crate::{Cancellation, DataError};

/// Batches that follow each other in the order of one rank or another.
pub(super) struct RankWindows {
    batches: ParquetBatches,
    epoch: u64,
    pinned: bool,
    /// How many threads share the windows.
    workers: AtomicUsize,
    runs: Vec<Run>,
    len: usize,
    /// The furthest run that was asked for a batch.
    current: AtomicUsize,
}

struct Run {
    /// The number of its first batch here.
    first: usize,
    rank: Rank,
    /// Its batches in its rank's order.
    numbers: Range<usize>,
    /// Those of them that are to be made; others are substitutes at most.
    left: Range<usize>,
    delivered: BTreeSet<usize>,
    /// Planned when they are near: a plan takes as long as there are row groups, and there may be thousands of ranks.
    windows: OnceLock<Windows>,
}

impl RankWindows {
    /// What is left of an epoch at this position.
    pub(super) fn new(batches: &ParquetBatches, position: &Position, pinned: bool) -> Result<Self, DataError> {
        let of_ranks = batches.of_ranks();
        let len = of_ranks.len(&position.earlier);
        let (mut runs, mut first, mut current) = (Vec::new(), 0, 0);
        for (rank, numbers) in of_ranks.runs(&position.earlier, 0..len) {
            let next = first + numbers.len();
            let delivered = position.before.range(first..next).map(|number| number - first + numbers.start);
            let delivered: BTreeSet<usize> = delivered.collect();
            let left = numbers.start + position.batch.clamp(first, next) - first..numbers.end;
            current += usize::from(next <= position.batch);
            runs.push(Run { first, rank, numbers, left, delivered, windows: OnceLock::new() });
            first = next;
        }
        let (batches, epoch, current) = (batches.clone(), position.epoch, AtomicUsize::new(current));
        let found = Self { batches, epoch, pinned, workers: AtomicUsize::new(1), runs, len, current };
        // What cannot be planned is an error before the epoch begins.
        found.ahead().try_for_each(|run| found.windows(run).map(|_| ()))?;
        Ok(found)
    }

    /// The runs that are read ahead: the current one and the next.
    fn ahead(&self) -> impl Iterator<Item = &Run> {
        self.runs.iter().skip(self.current.load(Relaxed)).take(2)
    }

    fn windows<'a>(&self, run: &'a Run) -> Result<&'a Windows, DataError> {
        if let Some(windows) = run.windows.get() {
            return Ok(windows);
        }
        let mut batches = self.batches.clone();
        batches.rank = run.rank;
        let windows = Windows::new(batches, self.epoch, run.left.clone(), &run.delivered, self.pinned)?;
        windows.shared_by(self.workers.load(Relaxed));
        // Another thread may have been first.
        Ok(run.windows.get_or_init(|| windows))
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
        self.windows(run)?.get(number - run.first + run.numbers.start, is_substitute, cancelled)
    }

    fn read_ahead(&self, cancelled: &Cancellation) -> bool {
        self.ahead().filter_map(|run| self.windows(run).ok()).any(|windows| windows.read_ahead(cancelled))
    }

    fn parts_ahead(&self) -> usize {
        self.ahead().filter_map(|run| self.windows(run).ok()).map(Windows::parts_ahead).sum()
    }

    fn shared_by(&self, workers: usize) {
        self.workers.store(workers, Relaxed);
        self.runs.iter().filter_map(|run| run.windows.get()).for_each(|windows| windows.shared_by(workers));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ParquetDataset;
    use crate::loader::Earlier;

    #[test]
    fn runs_of_other_ranks_are_planned_when_they_are_near() -> Result<(), DataError> {
        let file = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/parquet/part-0.parquet");
        let rows = ParquetDataset::from_files(vec![file; 4])?.select(["int64"])?;
        let position = Position { earlier: vec![Earlier { ranks: 20, batches: 1 }], ..Position::default() };
        let windows = RankWindows::new(&rows.batches(1)?, &position, false)?;
        let planned = || windows.runs.iter().filter(|run| run.windows.get().is_some()).count();
        assert_eq!((windows.runs.len(), planned()), (20, 2));
        for number in 0..windows.len() {
            windows.get(number, false, &Cancellation::default())?;
            assert!(planned() <= 2 + windows.current.load(Relaxed), "batch {number}");
        }
        assert_eq!(planned(), 20);
        Ok(())
    }
}
