//! What happens to a bad sample.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use crate::DataError;

/// What a loader does with a sample that cannot be read, decoded or collated.
///
/// Panics, and errors that belong to no single sample, end the epoch under every policy: they point to a mistake in the
/// program, not in the data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// Ends the epoch: the error takes the place of the batch.
    #[default]
    Fail,
    /// Skips the sample: its batch gets smaller.
    ///
    /// A batch that has lost all its samples is not delivered. Where several ranks share the data
    /// ([`Sampler::world_size`](crate::Sampler::world_size)), all must make the same number of steps, so there such a
    /// batch is filled as by [`Replace`](Self::Replace), with that policy's errors. A stream with `batches_per_epoch`
    /// delivers the next batch instead; after 256 empty batches in a row the epoch ends with
    /// [`DataError::StreamEnded`].
    Skip,
    /// Replaces the sample by another of the epoch's samples of all ranks, chosen by a function of (seed, epoch, the
    /// sample's position in the order, the number of the try): every batch keeps its size, and every rank its number of
    /// batches. Fails when 256 substitutes in a row are bad too: where
    /// nine of ten samples are bad, that happens once in 500 billion bad samples, and where all are bad, at the first
    /// one. Each bad substitute is listed as a fault as well. Where intact samples do not fit together (images of
    /// different sizes for [`Stack`](crate::Stack)), the batch is read again up to 64 times, then it fails.
    Replace,
}

/// A bad sample that was skipped or replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fault {
    /// The epoch in which it was read.
    pub epoch: u64,
    /// The sample's index; see [`Drawn::index`](crate::Drawn::index) for streams.
    pub index: u64,
    /// The dataset's name for it, see [`Dataset::key`](crate::Dataset::key); in a stream, the shard's file or other
    /// name and the format's name for the item, see [`DataError::StreamItem`].
    pub key: Option<String>,
    /// What was wrong.
    pub error: String,
}

/// Only the latest faults are kept, so that a broken disk does not fill the memory.
const KEPT: usize = 1000;

#[derive(Debug, Default)]
pub(crate) struct FaultLog(Mutex<VecDeque<Fault>>);

impl FaultLog {
    pub(crate) fn add(&self, fault: Fault) {
        tracing::warn!(index = fault.index, key = fault.key, epoch = fault.epoch, error = fault.error, "bad sample");
        let mut faults = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if faults.len() == KEPT {
            faults.pop_front();
        }
        faults.push_back(fault);
    }

    pub(crate) fn latest(&self) -> Vec<Fault> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).iter().cloned().collect()
    }

    pub(crate) fn clear(&self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }
}

impl Fault {
    pub(crate) fn new(epoch: u64, index: u64, key: Option<String>, error: &DataError) -> Self {
        Self { epoch, index, key, error: error.to_string() }
    }

    /// The fault of a stream's item, whose name is in the error.
    pub(crate) fn of_item(epoch: u64, index: u64, error: &DataError) -> Self {
        Self::new(epoch, index, error.key().map(str::to_owned), error)
    }
}
