//! Batches of rows through the loader.

use std::sync::{Arc, OnceLock};

use super::batches::ParquetBatches;
use crate::columns::Table;
use crate::tensor_dataset::RowNumbers;
use crate::{BatchSamples, Cancellation, Collate, DataError, DataLoader, DataLoaderBuilder, FromDataset};

impl ParquetBatches {
    /// A builder of a loader over these batches, with workers, resume, copies to a device and statistics as in any
    /// loader. Each of its samples is one whole batch, so `batch_size` stays 1, and [`OnError`](crate::OnError) skips or
    /// replaces the batch of a bad row, which the fault names. While batches of one window are made, the next window is
    /// decoded in the background.
    ///
    /// The loader's `shuffle(true)` is the same as [`shuffle`](Self::shuffle) with the loader's seed: it shuffles rows
    /// within windows of row groups. It does not permute whole batches: then every batch would need another window to
    /// be decoded. Nor should several ranks use a `sampler` over the batches' numbers: each would read every row group.
    /// [`rank`](Self::rank) gives each rank its own row groups.
    ///
    /// ```no_run
    /// use overdrive_dataload::ParquetDataset;
    ///
    /// let rows = ParquetDataset::open("train-*.parquet")?.select(["features", "label"])?;
    /// let loader = rows.batches(1024)?.shuffle(true).loader().num_workers(2).build()?;
    /// for batch in &loader {
    ///     let batch = batch?;
    ///     println!("{:?}", batch.tensor("label")?.size());
    /// }
    /// # Ok::<(), overdrive_dataload::DataError>(())
    /// ```
    pub fn loader(self) -> DataLoaderBuilder<FromDataset<RowNumbers>, MakeBatch> {
        let mut builder = DataLoader::builder(RowNumbers::below(self.len()));
        builder.options.order = self.identity();
        let seed = Arc::<OnceLock<u64>>::default();
        builder.options.shuffles_rows = Some(seed.clone());
        builder.collate(MakeBatch { batches: self, seed, shuffled: OnceLock::new() })
    }
}

/// A collate function that makes the batch whose number it gets; see [`ParquetBatches::loader`].
pub struct MakeBatch {
    batches: ParquetBatches,
    /// The loader's seed, where its `shuffle` is on.
    seed: Arc<OnceLock<u64>>,
    /// The batches shuffled with that seed.
    shuffled: OnceLock<ParquetBatches>,
}

impl MakeBatch {
    fn batches(&self) -> &ParquetBatches {
        match self.seed.get() {
            Some(&seed) if !self.batches.shuffle => {
                self.shuffled.get_or_init(|| self.batches.clone().seed(seed).shuffle(true))
            }
            _ => &self.batches,
        }
    }

    fn make(&self, epoch: u64, number: i64, pinned: bool, cancelled: &Cancellation) -> Result<Table, DataError> {
        self.batches().batch_ahead(epoch, number as usize, pinned, cancelled)
    }
}

fn more_than_one(numbers: usize) -> DataError {
    DataError::option("batch_size", "1, since each sample is a batch", numbers)
}

impl Collate<i64> for MakeBatch {
    type Batch = Table;

    /// The batch of epoch 0.
    fn collate(&self, numbers: Vec<i64>) -> Result<Table, DataError> {
        match numbers[..] {
            [number] => self.make(0, number, false, &Cancellation::default()),
            _ => Err(more_than_one(numbers.len())),
        }
    }

    fn collate_from(&self, samples: &mut BatchSamples<'_, i64>) -> Result<Table, DataError> {
        if samples.len() > 1 {
            return Err(more_than_one(samples.len()));
        }
        while let Some(number) = samples.next()? {
            let (epoch, pinned, cancelled) = (samples.epoch(), samples.pinned(), samples.cancelled());
            match self.make(epoch, number.sample, pinned, &cancelled) {
                Ok(table) => {
                    samples.counts(table.rows());
                    return Ok(table);
                }
                Err(DataError::Cancelled) => return Err(DataError::Cancelled),
                Err(error) => samples.reject(error)?,
            }
        }
        Err(DataError::EmptyBatch)
    }
}
