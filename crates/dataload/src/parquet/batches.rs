//! Shuffled batches, a window of row groups at a time.

use std::ops::Range;
use std::sync::Arc;

use super::array::Array;
use super::column::ParquetTable;
use super::dataset::ParquetDataset;
use super::epoch::ParquetEpoch;
use super::recent::Recent;
use super::words::Spare;
use crate::permutation::shuffle;
use crate::rank::Rank;
use crate::{DataError, Philox, RandomSampler, Sampler};

/// Row groups that are mixed unless [`ParquetBatches::window`] says otherwise.
const WINDOW: usize = 4;
/// Batches that threads may make at a time through [`ParquetBatches::batch`] without a window being decoded again: as
/// many windows are kept as these reach over, and never fewer than two.
const AT_A_TIME: usize = 16;
/// The random streams of the rows of a window have this bit; that of the row groups is the epoch's number.
const ROWS: u64 = 1 << 63;

/// Batches of rows as tensors, made by [`ParquetDataset::batches`].
///
/// When they are shuffled, the row groups come in a random order, some of them at a time are a window, and the rows of
/// a window come in a random order: so every row group is read once an epoch. The order is a function of (seed, epoch),
/// whatever the number of threads, and an epoch holds every row once.
///
/// With [`rank`](Self::rank), each of several processes takes its part of that order of row groups, and reads no others:
/// [`ParquetDataset::decoded_row_groups`] counts.
#[derive(Clone)]
pub struct ParquetBatches {
    pub(super) dataset: ParquetDataset,
    batch_size: usize,
    window: usize,
    pub(super) shuffle: bool,
    /// Which part of the rows is this process's.
    rank: Rank,
    seed: u64,
    recent: Arc<Recent<(u64, usize), Window>>,
    pub(super) spare: Arc<Spare>,
}

/// Which rows an epoch visits when.
pub(super) struct Plan {
    epoch: u64,
    /// The row groups in their order, and which rows of each.
    parts: Vec<(usize, Range<usize>)>,
    /// For each window, the places of its row groups in the order, and of its rows among those of the epoch.
    pub(super) windows: Vec<(Range<usize>, Range<usize>)>,
}

/// Some row groups, decoded, and the order of their rows.
pub(super) struct Window {
    pub(super) arrays: Vec<Array>,
    /// None where they come as they are.
    order: Option<Vec<u32>>,
    /// The places of its rows among those of the epoch.
    pub(super) places: Range<usize>,
}

impl ParquetBatches {
    pub(super) fn new(dataset: ParquetDataset, batch_size: usize) -> Result<Self, DataError> {
        if batch_size == 0 {
            return Err(DataError::option("batch_size", "at least 1", batch_size));
        }
        let (window, seed, spare, recent) = (WINDOW, 0, Arc::default(), Arc::new(Recent::new(1)));
        let rank = Rank::new(1, 0)?;
        Ok(Self { dataset, batch_size, window, shuffle: false, rank, seed, recent, spare }.forget())
    }

    /// Whether rows come in a random order; off unless set.
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.shuffle = shuffle;
        self.forget()
    }

    /// The seed of the random order; 0 unless set.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self.forget()
    }

    /// How many row groups are mixed, and in memory at a time for each thread; 4 unless set.
    pub fn window(mut self, row_groups: usize) -> Self {
        self.window = row_groups.max(1);
        self.forget()
    }

    /// Whether an incomplete last batch is left out; off unless set.
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.rank.drop_last = drop_last;
        self.forget()
    }

    /// Takes the part of one of several processes, the one with number `rank` of `world_size`: equally many rows, and so
    /// batches, on each. All give the same seed and options.
    ///
    /// The epoch's order of row groups, which is the same for all, is cut into as many pieces. So the ranks read different
    /// row groups, apart from those that a cut goes through, of which each of two takes its rows. What is missing for equal
    /// pieces comes from the order's start, or with [`drop_last`](Self::drop_last) the remainder is left out. Other than with
    /// a [`DistributedSampler`](crate::DistributedSampler), a batch of all ranks together depends on their number.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a `world_size` of 0 or a `rank` that is not below it.
    pub fn rank(mut self, rank: usize, world_size: usize) -> Result<Self, DataError> {
        let drop_last = self.rank.drop_last;
        self.rank = Rank::new(world_size, rank)?;
        self.rank.drop_last = drop_last;
        Ok(self.forget())
    }

    /// What the batches of an epoch follow from, for a saved state to be compared with.
    pub(super) fn identity(&self) -> Vec<(&'static str, i64)> {
        let mut identity = vec![
            ("parquet.rows", self.dataset.rows() as i64),
            ("parquet.batch_size", self.batch_size as i64),
            ("parquet.window", self.window as i64),
            ("parquet.shuffle", i64::from(self.shuffle)),
            ("parquet.seed", self.seed as i64),
        ];
        if self.rank.world_size > 1 {
            identity.push(("parquet.world_size", self.rank.world_size as i64));
            identity.push(("parquet.drop_last", i64::from(self.rank.drop_last)));
        }
        identity
    }

    fn forget(self) -> Self {
        let (rows, groups) = (self.dataset.rows(), self.dataset.groups.len());
        let rows_of_window = (rows / groups.max(1)).saturating_mul(self.window).max(1);
        let keep = 2 + (AT_A_TIME.saturating_mul(self.batch_size) / rows_of_window).min(groups);
        Self { recent: Arc::new(Recent::new(keep)), ..self }
    }

    /// How many rows an epoch has on this rank.
    fn rows(&self) -> usize {
        self.rank.share(self.dataset.rows())
    }

    /// How many batches an epoch has.
    pub fn len(&self) -> usize {
        let rows = self.rows();
        if self.rank.drop_last { rows / self.batch_size } else { rows.div_ceil(self.batch_size) }
    }

    /// Whether an epoch has no batch at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The batches of an epoch, which threads begin to make at once.
    pub fn epoch(&self, epoch: u64) -> ParquetEpoch {
        self.epoch_from(epoch, 0)
    }

    /// The batches of an epoch from the one with this number on; of the row groups before it none is read.
    pub fn epoch_from(&self, epoch: u64, number: usize) -> ParquetEpoch {
        ParquetEpoch::start(self.clone(), epoch, number)
    }

    /// One batch of an epoch, which is a function of (seed, epoch, number). The windows of the latest calls are kept
    /// decoded, so that threads which make neighbouring batches share them.
    ///
    /// # Errors
    /// [`DataError::IndexOutOfRange`] for a number that is not below [`len`](Self::len); as [`ParquetDataset::read`].
    pub fn batch(&self, epoch: u64, number: usize) -> Result<ParquetTable, DataError> {
        let len = self.len();
        if number >= len {
            return Err(DataError::IndexOutOfRange { index: number, len });
        }
        let (plan, places) = (self.plan(epoch)?, self.places(number));
        let mut batch: Option<Vec<Array>> = None;
        for (number, (_, rows)) in plan.windows.iter().enumerate() {
            if rows.end <= places.start || places.end <= rows.start {
                continue;
            }
            let threads = self.dataset.options.threads;
            let window = self.recent.get((epoch, number), || self.window_of(&plan, number, threads))?;
            let piece = window.gather(&places)?;
            batch = Some(join(batch, piece)?);
        }
        self.dataset.table(batch.unwrap_or_default(), places.len())
    }

    /// Where the rows of a batch are among those of its epoch.
    pub(super) fn places(&self, number: usize) -> Range<usize> {
        let place = |number: usize| number.saturating_mul(self.batch_size).min(self.rows());
        place(number)..place(number + 1)
    }

    /// The batches that have rows at these places.
    pub(super) fn batches_of(&self, places: &Range<usize>) -> Range<usize> {
        places.start / self.batch_size..places.end.div_ceil(self.batch_size).min(self.len())
    }

    pub(super) fn plan(&self, epoch: u64) -> Result<Plan, DataError> {
        let groups = self.dataset.groups.len();
        let order = match self.shuffle {
            true => RandomSampler::new(groups, self.seed).order(epoch),
            false => (0..groups).collect(),
        };
        let parts = self.own_parts(&order);
        let mut place = 0;
        let mut windows = Vec::with_capacity(parts.len().div_ceil(self.window));
        for start in (0..parts.len()).step_by(self.window) {
            let end = start.saturating_add(self.window).min(parts.len());
            let decoded: usize = parts[start..end].iter().map(|(group, _)| self.dataset.groups[*group].rows).sum();
            if u32::try_from(decoded).is_err() {
                return Err(DataError::option("window", "row groups of less than 2^32 rows in all", decoded));
            }
            let rows: usize = parts[start..end].iter().map(|(_, rows)| rows.len()).sum();
            windows.push((start..end, place..place + rows));
            place += rows;
        }
        Ok(Plan { epoch, parts, windows })
    }

    /// The rows of this rank: a piece of the order of row groups, which begins again behind its end.
    fn own_parts(&self, order: &[usize]) -> Vec<(usize, Range<usize>)> {
        let (of_all, mut left) = (self.dataset.rows(), self.rows());
        // The rows before this rank's; there are some, or nothing is left.
        let mut before = self.rank.first(of_all) % of_all.max(1);
        let mut parts = Vec::new();
        for &group in order.iter().cycle() {
            if left == 0 {
                break;
            }
            let rows = self.dataset.groups[group].rows;
            let first = before.min(rows);
            let end = rows.min(first.saturating_add(left));
            if first < end {
                parts.push((group, first..end));
            }
            (before, left) = (before - first, left - (end - first));
        }
        parts
    }

    /// Decodes a window and shuffles its rows.
    pub(super) fn window_of(&self, plan: &Plan, number: usize, threads: usize) -> Result<Window, DataError> {
        let (parts, places) = &plan.windows[number];
        let parts = &plan.parts[parts.clone()];
        let groups: Vec<usize> = parts.iter().map(|(group, _)| *group).collect();
        let arrays = self.dataset.decode(&groups, threads, &self.spare)?;
        let rows_of = |group: usize| self.dataset.groups[group].rows;
        let whole = parts.iter().all(|(group, rows)| rows.len() == rows_of(*group));
        let mut order = None;
        if self.shuffle || !whole {
            let (mut first, mut rows) = (0, Vec::with_capacity(places.len()));
            for (group, part) in parts {
                // Fewer than 2^32 of them.
                rows.extend(part.clone().map(|row| (first + row) as u32));
                first += rows_of(*group);
            }
            if self.shuffle {
                // Of no rank as of another.
                let number = self.rank.number() * (self.dataset.groups.len() as u64 + 2) + number as u64;
                shuffled(&mut rows, Philox::new(self.seed, ROWS | plan.epoch << 32 | number));
            }
            order = Some(rows);
        }
        Ok(Window { arrays, order, places: places.clone() })
    }
}

impl Window {
    /// The rows of the window that are at these places of the epoch.
    pub(super) fn gather(&self, places: &Range<usize>) -> Result<Vec<Array>, DataError> {
        let start = places.start.max(self.places.start) - self.places.start;
        let end = places.end.min(self.places.end).saturating_sub(self.places.start).max(start);
        let whole;
        let rows = match &self.order {
            Some(order) => &order[start..end],
            None => {
                whole = (start as u32..end as u32).collect::<Vec<_>>();
                whole.as_slice()
            }
        };
        self.arrays.iter().map(|array| array.gather(rows)).collect()
    }
}

/// What is there of a batch, and what comes behind it.
pub(super) fn join(before: Option<Vec<Array>>, piece: Vec<Array>) -> Result<Vec<Array>, DataError> {
    match before {
        None => Ok(piece),
        Some(before) => before.into_iter().zip(piece).map(|(before, piece)| before.join(piece)).collect(),
    }
}

/// Puts rows into a random order.
fn shuffled(rows: &mut [u32], numbers: Philox) {
    let mut numbers = numbers.iter();
    // It never ends.
    shuffle(rows, || numbers.next().unwrap_or_default());
}
