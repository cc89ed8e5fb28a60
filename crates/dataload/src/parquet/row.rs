//! Single rows: by index, or as a stream whose shards are the row groups.

use super::dataset::{ParquetDataset, Selected};
use crate::columns::{Array, Row, Spare};
use crate::loader::fingerprint;
use crate::{Cancellation, DataError, Dataset, Deferred, IterableDataset, Map, Samples};

impl ParquetDataset {
    /// The rows, each passed through `transform`. The result is both a [`Dataset`] and an [`IterableDataset`], as this
    /// is.
    ///
    /// ```no_run
    /// use overdrive_dataload::{DataError, DataLoader, Dataset, IterableDataset, ParquetDataset};
    ///
    /// let rows = ParquetDataset::open("train-*.parquet")?;
    /// let labels = rows.map(|row| row.int("label").ok_or_else(|| DataError::other("no label")));
    /// let in_any_order = DataLoader::builder(labels.clone()).batch_size(64).build()?;
    /// let by_row_group = DataLoader::stream(labels).batch_size(64).shuffle(true).shuffle_buffer(500).build()?;
    /// # Ok::<(), DataError>(())
    /// ```
    pub fn map<T, F>(self, transform: F) -> Map<Self, F>
    where
        F: Fn(Row) -> Result<T, DataError> + Send + Sync,
    {
        Map::new(self, transform)
    }

    fn row(&self, columns: &[Vec<Array>], row: usize) -> Result<Row, DataError> {
        // Those of one row group.
        let arrays = columns
            .iter()
            .map(|arrays| Array::copied(arrays.iter().map(|array| (array, row..row + 1)).collect(), false));
        Row::new(self.columns.iter().map(|column| column.name.clone()).zip(arrays))
    }
}

/// Rows by index. The thread that asks for a row decodes its whole row group, and the latest four row groups are kept.
/// So rows in random order over many row groups are slow: use [`ParquetBatches`](crate::ParquetBatches) to shuffle.
impl Dataset for ParquetDataset {
    type Sample = Row;

    fn len(&self) -> usize {
        self.rows()
    }

    fn get(&self, index: usize) -> Result<Row, DataError> {
        let len = self.rows();
        if index >= len {
            return Err(DataError::IndexOutOfRange { index, len });
        }
        // The last row group that begins at or before the row, which skips empty ones.
        let group = self.groups.partition_point(|group| group.first_row <= index) - 1;
        let decode = || self.decode(&[group], 1, &Spare::default(), &Cancellation::default());
        let arrays = self.recent.get(group, decode)?;
        self.row(&arrays, index - self.groups[group].first_row)
    }
}

/// Rows in order, one row group per shard.
impl IterableDataset for ParquetDataset {
    type Sample = Row;

    fn shards(&self) -> usize {
        self.groups.len()
    }

    fn open_shard(&self, shard: usize, position: u64) -> Result<Samples<Row>, DataError> {
        self.rows_from(shard, position, &Cancellation::default())
    }

    fn open_deferred(
        &self,
        shard: usize,
        position: u64,
        cancelled: &Cancellation,
    ) -> Result<Samples<Deferred<Row>>, DataError> {
        let rows = self.rows_from(shard, position, cancelled)?.zip(position..);
        Ok(Box::new(rows.map(|(row, number)| Ok(row?.numbered(number)))))
    }

    /// The bytes of rows, and with them the ends of windows, depend on the columns that are read.
    fn fingerprint(&self) -> u64 {
        let is_plain = |column: &Selected| column.fill.is_none() && column.list_size.is_none();
        if self.columns.len() == self.files[0].leaves.len() && self.columns.iter().all(is_plain) {
            return 0;
        }
        let chosen = self.columns.iter().map(|column| (&column.name, &column.fill, column.list_size));
        fingerprint(&chosen.collect::<Vec<_>>())
    }

    /// The file, and the number of the row group in it.
    fn shard_name(&self, shard: usize) -> Option<String> {
        let group = self.groups.get(shard)?;
        Some(format!("{}, row group {}", self.files[group.file].source.path().display(), group.index))
    }
}

impl ParquetDataset {
    fn rows_from(&self, shard: usize, position: u64, cancelled: &Cancellation) -> Result<Samples<Row>, DataError> {
        let len = self.groups.len();
        let rows = self.groups.get(shard).ok_or(DataError::IndexOutOfRange { index: shard, len })?.rows;
        let first = usize::try_from(position).unwrap_or(usize::MAX).min(rows);
        let arrays = self.decode(&[shard], 1, &Spare::default(), cancelled)?;
        let dataset = self.clone();
        Ok(Box::new((first..rows).map(move |row| dataset.row(&arrays, row))))
    }
}
