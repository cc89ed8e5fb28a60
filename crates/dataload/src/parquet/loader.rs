//! Batches of rows through the loader.

use std::sync::{Arc, Mutex};

use super::batches::ParquetBatches;
use super::rank_windows::RankWindows;
use crate::columns::Table;
use crate::loader::{Identity, Indexed, Open, SampleSource, check_order};
use crate::{
    BatchSampler, BatchSamples, Collate, DataError, DataLoader, DataLoaderBuilder, FixedBatches, SequentialSampler,
};

impl ParquetBatches {
    /// A builder of a loader over these batches, with workers, resume, copies to a device and statistics as in any
    /// loader. Each of its samples is one whole batch, so `batch_size` stays 1, and [`OnError`](crate::OnError) skips or
    /// replaces a batch. A row group that cannot be decoded, or has a bad row, costs all batches of its window, each of which is
    /// a fault that names it: with [`window(1)`](Self::window), those of that row group.
    ///
    /// Workers decode the columns of a window together, and the next window while they have no batch to make. With
    /// `num_workers(0)`, batches are made on the calling thread, and the next window is decoded on as many others as
    /// make up [`threads`](crate::ParquetDataset::threads), but at least one.
    ///
    /// The loader's `shuffle(true)` is the same as [`shuffle`](Self::shuffle) with the loader's seed: it shuffles rows
    /// within windows of row groups. Of several ranks, [`rank`](Self::rank) gives each its own row groups.
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
    pub fn loader(self) -> DataLoaderBuilder<FromParquet, WholeTable> {
        let readers = (self.dataset.options.threads - 1).max(1);
        let mut builder = DataLoaderBuilder::new(FromParquet(self)).collate(WholeTable);
        builder.options.readers = readers;
        builder
    }
}

/// Batches of Parquet rows, in the order in which a loader reads them.
pub struct FromParquet(ParquetBatches);

impl SampleSource for FromParquet {
    type Sample = Table;
}

impl<C: Collate<Table> + 'static> DataLoaderBuilder<FromParquet, C> {
    /// Makes the loader; no thread is started yet.
    ///
    /// # Errors
    /// As [`build`](DataLoaderBuilder::build) of a dataset's loader.
    pub fn build(self) -> Result<DataLoader<C::Batch>, DataError> {
        let Self { source: FromParquet(mut batches), collate, options } = self;
        let mut order = vec![("shuffle", i64::from(options.shuffle)), ("drop_last", i64::from(options.drop_last))];
        order.extend(batches.identity());
        if options.shuffle {
            // Makes the state differ from that of a loader that permutes whole batches.
            order.push(("shuffle_rows", 1));
            batches = if batches.shuffle { batches } else { batches.seed(options.seed).shuffle(true) };
        }
        batches = if options.drop_last { batches.drop_last(true) } else { batches };
        let (sampler, batch_size) = (SequentialSampler::new(batches.len()), options.batch_size.unwrap_or(1));
        check_order(&sampler)?;
        let sampler = FixedBatches::new(sampler, batch_size, false)?;
        let (len, global_batch_size) = (batches.dataset.rows(), sampler.global_batch_size());
        let (ranks, shared) = (batches.of_ranks(), batches.rank.world_size > 1);
        let identity = Identity { stream: false, len, global_batch_size, seed: options.seed, order };
        let (stages, machinery) = options.assemble(collate)?;
        let pinned = stages.pinned;
        let open: Open<RankWindows> = Box::new(move |position, _| match batch_size {
            1 => RankWindows::new(&batches, position, pinned).map(Arc::new),
            _ => Err(DataError::option("batch_size", "1, since each sample is a batch", batch_size)),
        });
        let source = Indexed {
            open,
            stages: Arc::new(stages),
            batch_sampler: Arc::new(sampler),
            identity,
            own_order: false,
            known_order: Mutex::default(),
            store: None,
            torch_order: None,
            shared,
            ranks: Some(ranks),
        };
        Ok(DataLoader::new(Arc::new(source), machinery))
    }
}

/// A collate function for samples that are whole batches; see [`ParquetBatches::loader`].
#[derive(Clone, Copy, Debug, Default)]
pub struct WholeTable;

impl Collate<Table> for WholeTable {
    type Batch = Table;

    fn collate(&self, tables: Vec<Table>) -> Result<Table, DataError> {
        tables.into_iter().next().ok_or(DataError::EmptyBatch)
    }

    fn collate_from(&self, samples: &mut BatchSamples<'_, Table>) -> Result<Table, DataError> {
        let table = self.collate(samples.all()?)?;
        samples.counts(table.rows());
        Ok(table)
    }
}
