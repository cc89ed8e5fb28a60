//! One epoch of batches without a loader of one's own.

use std::iter::FusedIterator;

use super::batches::{ParquetBatches, WINDOW_BYTES};
use crate::columns::Table;
use crate::loader::MAX_WORKERS;
use crate::{DataError, Epoch};

/// How many batches each thread may make ahead, and how many bytes all of them may take.
const PREFETCH: usize = 32;
const BATCHES_AHEAD: usize = 2 * WINDOW_BYTES;

/// The batches of one epoch, in order; made by [`ParquetBatches::epoch`].
///
/// They are those of a [loader](ParquetBatches::loader) with [`threads`](crate::ParquetDataset::threads) workers, which
/// decode the row groups of a window together, and the next window meanwhile. Besides the [windows](ParquetBatches::window),
/// memory holds batches that are ahead, 32 for each thread, or fewer where these take 512 MiB. An error ends the epoch. Dropping the
/// epoch stops the threads after the few rows that they are decoding, or the batch that they are making, and joins them.
#[must_use = "its threads are already decoding; an epoch that is not iterated wastes their work"]
#[derive(Debug)]
pub struct ParquetEpoch(Result<Epoch<Table>, Option<DataError>>);

impl ParquetEpoch {
    pub(super) fn start(batches: ParquetBatches, epoch: u64, number: usize) -> Self {
        let threads = batches.dataset.options.threads.min(MAX_WORKERS);
        let builder = batches.loader().num_workers(threads).prefetch_factor(PREFETCH).memory_budget(BATCHES_AHEAD);
        let loader = builder.worker_nice(0).build();
        Self(loader.map(|loader| loader.epoch_from(epoch, number)).map_err(Some))
    }
}

impl Iterator for ParquetEpoch {
    type Item = Result<Table, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        match &mut self.0 {
            Ok(epoch) => epoch.next().map(|batch| match batch {
                // Its index is the batch's number, which the caller counts.
                Err(DataError::Sample { error, .. }) => Err(*error),
                batch => batch,
            }),
            Err(error) => error.take().map(Err),
        }
    }

    /// At most the remaining batches: an error may end the epoch earlier.
    fn size_hint(&self) -> (usize, Option<usize>) {
        self.0.as_ref().map_or((0, Some(1)), Epoch::size_hint)
    }
}

impl FusedIterator for ParquetEpoch {}
