//! What happens to a bad sample.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use crate::DataError;

/// What a loader does with a sample that cannot be read, decoded or collated.
///
/// Panics, and errors that belong to no single sample, end the epoch whatever the policy is: they tell of a mistake in
/// the program, not in the data.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum OnError {
    /// Ends the epoch with the error in the place of the batch.
    #[default]
    Fail,
    /// Leaves the sample out: its batch gets smaller.
    ///
    /// A batch of which nothing is left is not delivered, unless several ranks share the data
    /// ([`Sampler::world_size`](crate::Sampler::world_size)): each of them must make the same number of steps, so such a
    /// batch is filled as by [`Replace`](Self::Replace), with its errors. A stream with `batches_per_epoch` takes the next
    /// batch in its place; [`DataError::StreamEnded`] ends the epoch when 256 in a row have had nothing.
    Skip,
    /// Puts another of the epoch's samples in its place, drawn from (seed, epoch, draw) among those of all ranks: every
    /// batch keeps its size, and every rank its number of batches. Fails when 256 draws in a row are bad too: by chance
    /// once for 500 billion bad samples where nine of ten samples are bad, hardly ever where fewer are, and soon where
    /// all are. Each bad draw is a fault of its own. Where samples are whole and do not fit together (images of
    /// different sizes for [`Stack`](crate::Stack)), the batch is read anew up to 64 times, then it fails.
    Replace,
}

/// A bad sample that was left out or replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Fault {
    /// The epoch in which it was met.
    pub epoch: u64,
    /// Its index; see [`Drawn::index`](crate::Drawn::index) for streams.
    pub index: u64,
    /// The dataset's name for it, see [`Dataset::key`](crate::Dataset::key); of a stream, the shard's file or other
    /// name and what its format calls the item, see [`DataError::StreamItem`].
    pub key: Option<String>,
    /// What was wrong.
    pub error: String,
}

/// The latest faults are kept, so that a broken disk does not fill the memory.
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

    /// The same of an item of a stream, which its error names.
    pub(crate) fn of_item(epoch: u64, index: u64, error: &DataError) -> Self {
        Self::new(epoch, index, error.key().map(str::to_owned), error)
    }
}
