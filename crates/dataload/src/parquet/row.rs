//! Single rows: by index, or as a stream whose shards are the row groups.

use super::dataset::ParquetDataset;
use crate::columns::{Array, Row};
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

    /// A row of a row group, which is decoded.
    fn row(&self, group: &[Array], row: usize) -> Result<Row, DataError> {
        let arrays = group.iter().map(|array| Array::copied(vec![(array, row..row + 1)], false));
        Row::new(self.columns.names(), arrays.collect::<Result<_, _>>()?)
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
        let (group, row) = self.groups.find(index)?;
        let arrays = self.recent.get(group, || self.decode_group(group, &Cancellation::default()))?;
        self.row(&arrays, row)
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
        self.columns.fingerprint()
    }

    /// The file, and the number of the row group in it.
    fn shard_name(&self, shard: usize) -> Option<String> {
        let group = self.groups.get(shard).ok()?;
        Some(format!("{}, row group {}", self.files[group.file].source.path().display(), group.index))
    }
}

impl ParquetDataset {
    fn rows_from(&self, shard: usize, position: u64, cancelled: &Cancellation) -> Result<Samples<Row>, DataError> {
        let rows = self.groups.rows_from(shard, position)?;
        let (arrays, dataset) = (self.decode_group(shard, cancelled)?, self.clone());
        Ok(Box::new(rows.map(move |row| dataset.row(&arrays, row))))
    }
}
