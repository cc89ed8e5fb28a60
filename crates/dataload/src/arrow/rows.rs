//! Single rows: by index, or as a stream whose shards are the record batches.

use super::dataset::ArrowDataset;
use crate::columns::Row;
use crate::{Cancellation, DataError, Dataset, Deferred, IterableDataset, Map, Samples};

impl ArrowDataset {
    /// The rows, each passed through `transform`. The result is both a [`Dataset`] and an [`IterableDataset`], as this
    /// is.
    ///
    /// ```no_run
    /// use overdrive_dataload::{ArrowDataset, DataError, DataLoader};
    ///
    /// let rows = ArrowDataset::load_from_disk("imdb/train")?;
    /// let labels = rows.map(|row| row.int("label").ok_or_else(|| DataError::other("no label")));
    /// let in_any_order = DataLoader::builder(labels.clone()).batch_size(64).shuffle(true).build()?;
    /// let by_record_batch = DataLoader::stream(labels).batch_size(64).shuffle(true).shuffle_buffer(500).build()?;
    /// # Ok::<(), DataError>(())
    /// ```
    pub fn map<T, F>(self, transform: F) -> Map<Self, F>
    where
        F: Fn(Row) -> Result<T, DataError> + Send + Sync,
    {
        Map::new(self, transform)
    }

    fn row(&self, batch: usize, row: usize) -> Result<Row, DataError> {
        Row::new(self.columns.selection.names(), self.arrays(batch, row..row + 1)?)
    }

    fn rows_from(
        &self,
        shard: usize,
        position: u64,
    ) -> Result<impl Iterator<Item = Result<Row, DataError>> + Send + use<>, DataError> {
        let dataset = self.clone();
        Ok(self.batches.rows_from(shard, position)?.map(move |row| dataset.row(shard, row)))
    }
}

/// Rows by index, in any order. Only the row's own bytes are read, unless the file is compressed.
impl Dataset for ArrowDataset {
    type Sample = Row;

    fn len(&self) -> usize {
        self.rows()
    }

    fn get(&self, index: usize) -> Result<Row, DataError> {
        let (batch, row) = self.batches.find(index)?;
        self.row(batch, row)
    }
}

/// Rows in order, one record batch per shard.
impl IterableDataset for ArrowDataset {
    type Sample = Row;

    fn shards(&self) -> usize {
        self.batches.len()
    }

    fn open_shard(&self, shard: usize, position: u64) -> Result<Samples<Row>, DataError> {
        Ok(Box::new(self.rows_from(shard, position)?))
    }

    fn open_deferred(
        &self,
        shard: usize,
        position: u64,
        cancelled: &Cancellation,
    ) -> Result<Samples<Deferred<Row>>, DataError> {
        let (rows, cancelled) = (self.rows_from(shard, position)?.zip(position..), cancelled.clone());
        let named = move |(row, number): (Result<Row, DataError>, u64)| {
            cancelled.check()?;
            Ok(row?.numbered(number))
        };
        Ok(Box::new(rows.map(named)))
    }

    /// The bytes of a row, and so the ends of windows, depend on the columns that are read.
    fn fingerprint(&self) -> u64 {
        self.columns.selection.fingerprint()
    }

    /// The file, and the index of the record batch in it.
    fn shard_name(&self, shard: usize) -> Option<String> {
        let batch = self.batches.get(shard).ok()?;
        Some(format!("{}, record batch {}", self.files[batch.file].path.display(), batch.index))
    }
}
