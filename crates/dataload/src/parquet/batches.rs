//! Shuffled batches, from one window of row groups at a time.

use std::collections::BTreeSet;
use std::ops::Range;
use std::sync::Arc;

use super::dataset::ParquetDataset;
use super::epoch::ParquetEpoch;
use super::window::Window;
use super::windows::Windows;
use crate::columns::{Array, Place, Spare, Table};
use crate::loader::{Lookup, RankBatches};
use crate::permutation::shuffle;
use crate::rank::Rank;
use crate::{Cancellation, DataError, Philox, RandomSampler, Sampler};

/// The default of [`ParquetBatches::window`].
const WINDOW: usize = 4;
/// The bytes that a window of the default number of row groups may take: 256 MiB.
pub(super) const WINDOW_BYTES: usize = 256 << 20;
/// The bit that keeps two kinds of random streams of one seed apart. It is set in the numbers of the streams that
/// shuffle a window's rows, and not in those that order the row groups, which are the epochs' numbers.
const ROWS: u64 = 1 << 63;

/// Batches of rows as tensors, made by [`ParquetDataset::batches`].
///
/// With shuffling, the row groups are put into a random order, a few of them at a time form a window, and the rows of
/// each window are shuffled: so every row group is read once per epoch. The order is a function of (seed, epoch), for
/// any number of threads, and an epoch has every row once.
///
/// With [`rank`](Self::rank), each rank takes its part of that order of row groups, and reads no others;
/// [`ParquetDataset::decoded_row_groups`] counts them.
#[derive(Clone)]
pub struct ParquetBatches {
    pub(super) dataset: ParquetDataset,
    batch_size: usize,
    window: Option<usize>,
    window_bytes: Option<usize>,
    pub(super) shuffle: bool,
    /// Which part of the rows belongs to this rank.
    pub(super) rank: Rank,
    seed: u64,
    pub(super) spare: Arc<Spare>,
}

/// The order in which an epoch visits rows.
pub(super) struct Plan {
    pub(super) epoch: u64,
    /// The row groups in order, and which rows of each are used.
    pub(super) parts: Vec<(usize, Range<usize>)>,
    /// For each window, the range of its row groups in `parts`, and of its rows in the epoch.
    pub(super) windows: Vec<(Range<usize>, Range<usize>)>,
}

impl Plan {
    /// The row groups of a window, and which rows of each are used.
    pub(super) fn groups_of(&self, window: usize) -> &[(usize, Range<usize>)] {
        &self.parts[self.windows[window].0.clone()]
    }

    /// The windows with these rows of the epoch.
    pub(super) fn windows_of(&self, places: &Range<usize>) -> Range<usize> {
        let start = self.windows.partition_point(|(_, rows)| rows.end <= places.start);
        start..self.windows.partition_point(|(_, rows)| rows.start < places.end).max(start)
    }
}

impl ParquetBatches {
    pub(super) fn new(dataset: ParquetDataset, batch_size: usize) -> Result<Self, DataError> {
        DataError::at_least_1("batch_size", batch_size)?;
        let (window, window_bytes, shuffle, rank) = (None, None, false, Rank::new(1, 0)?);
        Ok(Self { dataset, batch_size, window, window_bytes, shuffle, rank, seed: 0, spare: Arc::default() })
    }

    /// Whether rows are shuffled; off unless set.
    pub fn shuffle(mut self, shuffle: bool) -> Self {
        self.shuffle = shuffle;
        self
    }

    /// The seed of the random order; 0 unless set.
    pub fn seed(mut self, seed: u64) -> Self {
        self.seed = seed;
        self
    }

    /// How many row groups are shuffled together; unless set 4, or fewer where these take more than 256 MiB, but at least
    /// one. Memory holds the windows that batches are being made of, one or two, and one or two after them; where these
    /// have fewer columns and row groups than there are workers, up to 512 MiB of further ones.
    pub fn window(mut self, row_groups: usize) -> Self {
        self.window = Some(row_groups.max(1));
        self
    }

    /// How many bytes the decoded rows of a [`window`](Self::window) may take, by what the files' footers say of the
    /// selected columns; a window has one row group at least. The order of the rows depends on it.
    pub fn window_bytes(mut self, bytes: usize) -> Self {
        self.window_bytes = Some(bytes);
        self
    }

    /// Whether an incomplete last batch is dropped; off unless set.
    pub fn drop_last(mut self, drop_last: bool) -> Self {
        self.rank.drop_last = drop_last;
        self
    }

    /// Takes the part of rank `rank` of `world_size` ranks: each gets the same number of rows, and so of batches. All
    /// ranks need the same seed and options.
    ///
    /// The epoch's order of row groups, which is the same on all ranks, is cut into `world_size` pieces. So the ranks
    /// read different row groups, except where a cut goes through one: then two ranks read it, each for its own rows.
    /// Pieces are made equal with rows from the order's start, or with [`drop_last`](Self::drop_last) by dropping the
    /// remainder. Unlike with a [`DistributedSampler`](crate::DistributedSampler), a global batch depends on the number
    /// of ranks.
    ///
    /// A [`loader`](Self::loader)'s state, which is the same on all ranks, can be loaded by any number of ranks of the same
    /// `batch_size` where batches come in order. In that epoch these go on with the batches that the ranks before had left,
    /// one rank's after the other's, each with a contiguous part of them. So no row is lost; in place of rows, batches are
    /// repeated or dropped there to make the parts equal. The number of ranks can change eight times in one epoch.
    ///
    /// # Errors
    /// [`DataError::InvalidOption`] for a `world_size` of 0 or a `rank` that is not below it.
    pub fn rank(mut self, rank: usize, world_size: usize) -> Result<Self, DataError> {
        let drop_last = self.rank.drop_last;
        self.rank = Rank::new(world_size, rank)?;
        self.rank.drop_last = drop_last;
        Ok(self)
    }

    /// The settings that the batches depend on, to be compared with a saved state.
    pub(super) fn identity(&self) -> Vec<(&'static str, i64)> {
        let mut identity = vec![
            ("parquet.batch_size", self.batch_size as i64),
            // 0 for the default, which has a default of bytes too.
            ("parquet.window", self.window.map_or(0, |row_groups| row_groups as i64)),
            ("parquet.shuffle", i64::from(self.shuffle)),
            ("parquet.seed", self.seed as i64),
            ("parquet.drop_last", i64::from(self.rank.drop_last)),
        ];
        // The ends of windows depend on the sizes of the columns that are read.
        let sizes = (0..self.dataset.groups.len()).fold(0, |crc, group| {
            crc32c::crc32c_append(crc, &(self.dataset.decoded_bytes(group) as u64).to_le_bytes())
        });
        identity.push(("parquet.sizes", i64::from(sizes)));
        identity.extend(self.window_bytes.map(|bytes| ("parquet.window_bytes", bytes as i64)));
        identity
    }

    /// How many rows an epoch has on this rank.
    fn rows(&self) -> usize {
        self.rank.share(self.dataset.rows())
    }

    /// How many batches an epoch has.
    pub fn len(&self) -> usize {
        self.of_ranks().len(&[])
    }

    /// The batches of this rank among those of all.
    pub(super) fn of_ranks(&self) -> RankBatches {
        RankBatches { rank: self.rank, rows: self.dataset.rows(), batch_size: self.batch_size }
    }

    /// Whether an epoch has no batch at all.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The batches of an epoch; its threads start at once.
    pub fn epoch(&self, epoch: u64) -> ParquetEpoch {
        self.epoch_from(epoch, 0)
    }

    /// The batches of an epoch from batch `number` on; earlier row groups are not read.
    pub fn epoch_from(&self, epoch: u64, number: usize) -> ParquetEpoch {
        ParquetEpoch::start(self.clone(), epoch, number)
    }

    /// One batch of an epoch, a function of (seed, epoch, number). Each call decodes all of the batch's window on the
    /// calling thread: take batches that follow each other from an [`epoch`](Self::epoch) or a [`loader`](Self::loader).
    ///
    /// # Errors
    /// [`DataError::IndexOutOfRange`] for a number that is not below [`len`](Self::len); as [`ParquetDataset::read`].
    pub fn batch(&self, epoch: u64, number: usize) -> Result<Table, DataError> {
        self.read_batch(epoch, number, false, &Cancellation::default())
    }

    /// The same, in pinned memory when `pinned`, which gives up when `cancelled`.
    pub(super) fn read_batch(
        &self,
        epoch: u64,
        number: usize,
        pinned: bool,
        cancelled: &Cancellation,
    ) -> Result<Table, DataError> {
        let len = self.len();
        DataError::check_index(number, len)?;
        let windows = Windows::new(self.clone(), epoch, number..number + 1, &BTreeSet::new(), pinned)?;
        windows.get(number, false, cancelled)
    }

    /// The range of a batch's rows in its epoch.
    pub(super) fn places(&self, number: usize) -> Range<usize> {
        let place = |number: usize| number.saturating_mul(self.batch_size).min(self.rows());
        place(number)..place(number + 1)
    }

    /// The batches that have rows in this range of the epoch.
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
        let (mut start, mut windows) = (0, Vec::new());
        while start < parts.len() {
            let end = start + self.groups_of_window(&parts[start..]);
            let decoded: usize = parts[start..end].iter().map(|(group, _)| self.dataset.groups[*group].rows).sum();
            if u32::try_from(decoded).is_err() {
                return Err(DataError::option("window", "row groups of less than 2^32 rows in total", decoded));
            }
            let rows: usize = parts[start..end].iter().map(|(_, rows)| rows.len()).sum();
            windows.push((start..end, place..place + rows));
            (start, place) = (end, place + rows);
        }
        Ok(Plan { epoch, parts, windows })
    }

    /// How many row groups the window has that begins with the first of `parts`.
    fn groups_of_window(&self, parts: &[(usize, Range<usize>)]) -> usize {
        let default_bytes = if self.window.is_none() { WINDOW_BYTES } else { usize::MAX };
        let limit = self.window_bytes.unwrap_or(default_bytes);
        let bytes = parts.iter().take(self.window.unwrap_or(WINDOW)).scan(0usize, |bytes, (group, _)| {
            *bytes = bytes.saturating_add(self.dataset.decoded_bytes(*group));
            Some(*bytes)
        });
        bytes.take_while(|&bytes| bytes <= limit).count().max(1)
    }

    /// This rank's rows: a contiguous piece of the row groups in `order`; past the end, the order starts over.
    fn own_parts(&self, order: &[usize]) -> Vec<(usize, Range<usize>)> {
        let (of_all, mut left) = (self.dataset.rows(), self.rows());
        // The number of rows before this rank's.
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

    /// The shuffled rows of a window: the number of the row group in it, and the row in that.
    pub(super) fn order_of(&self, plan: &Plan, number: usize) -> Vec<Place> {
        let mut order = Vec::with_capacity(plan.windows[number].1.len());
        for (array, (_, rows)) in plan.groups_of(number).iter().enumerate() {
            // `plan` has checked that a window has fewer than 2^32 rows.
            order.extend(rows.clone().map(|row| Place { array: array as u32, row: row as u32 }));
        }
        // Each rank has its own range of streams. It has at most `groups + 1` windows, because its piece may begin and end
        // in one row group.
        let number = self.rank.number() * (self.dataset.groups.len() as u64 + 2) + number as u64;
        let mut numbers = Philox::new(self.seed, ROWS | plan.epoch << 32 | number).iter();
        // The iterator is endless.
        shuffle(&mut order, || numbers.next().unwrap_or_default());
        order
    }

    /// The rows in this range of the epoch, of windows one behind the other, in pinned memory when `pinned`.
    pub(super) fn rows_of(
        &self,
        windows: &[Arc<Window>],
        places: &Range<usize>,
        pinned: bool,
    ) -> Result<Table, DataError> {
        let pieces = windows.iter().flat_map(|window| window.pieces(places).map(move |piece| (window, piece)));
        let pieces: Vec<_> = pieces.collect();
        let column = |column: usize| {
            let ranges = pieces.iter().map(|(window, (array, rows))| (&window.columns[column][*array], rows.clone()));
            Array::copied(ranges.collect(), pinned)
        };
        let arrays = (0..self.dataset.selected().len()).map(column).collect::<Result<_, _>>()?;
        self.dataset.table(arrays, places.len(), pinned)
    }
}
