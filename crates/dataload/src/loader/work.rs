//! What a loader needs from the source of its batches.

use std::sync::Arc;

use crate::loader::position::{Bounds, Identity, Mark, Position};
use crate::loader::transfer::Uploaded;
use crate::tensor_batch::Footprint;
use crate::{Cancellation, DataError};

/// Makes the batches of each epoch.
pub(crate) trait BatchSource<B>: Send + Sync {
    /// Starts an epoch at `position`, which gets the state of the generator that its order is drawn from; its threads
    /// share the result.
    fn begin(&self, position: &mut Position) -> Result<Arc<dyn EpochWork<B>>, DataError>;

    /// How many batches the epoch of a position has, where that is known beforehand.
    fn batches(&self, position: &Position) -> Option<usize>;

    /// The settings that must be equal for a saved position to mean the same batches.
    fn identity(&self) -> Identity;

    /// The limits that a saved position must keep.
    fn bounds(&self) -> Bounds;

    /// A checksum of an epoch's order, the same on every rank, where the identity does not determine the order.
    fn order(&self, _epoch: u64) -> Result<Option<u32>, DataError> {
        Ok(None)
    }

    /// The state of its own generator, from which the next epoch is drawn.
    fn generator(&self) -> Option<Arc<[u8]>> {
        None
    }
}

/// One epoch, processed by any number of threads.
pub(crate) trait EpochWork<B>: Send + Sync {
    /// Makes the next batch that no thread has begun; `None` when no batch is left, or `cancelled` was set.
    fn make(&self, cancelled: &Cancellation) -> Option<Made<B>>;

    /// Reads ahead a part of what later batches need; false where there is nothing left to read, or no room. Threads
    /// that may not make a batch now call it.
    fn read_ahead(&self, _cancelled: &Cancellation) -> bool {
        false
    }

    /// How many threads [`read_ahead`](Self::read_ahead) would have something to do for.
    fn parts_ahead(&self) -> usize {
        0
    }

    /// Tells how many workers share it from now on.
    fn shared_by(&self, _workers: usize) {}
}

/// Samples by index, as the threads of one epoch read them: those of a [`Dataset`](crate::Dataset), or whole batches that are made of
/// something larger.
pub(crate) trait Lookup: Send + Sync {
    type Sample: Send;

    fn len(&self) -> usize;

    /// The sample at `index`, which is below [`len`](Self::len). Each is asked for once, when it is due, and again as a
    /// substitute for a bad one.
    fn get(&self, index: usize, is_substitute: bool, cancelled: &Cancellation) -> Result<Self::Sample, DataError>;

    /// How much memory a sample takes, where that is known.
    fn bytes(&self, _sample: &Self::Sample) -> usize {
        0
    }

    /// Tells that a sample which is due is not asked for: its batch was made without it.
    fn pass_over(&self, _index: usize) {}

    /// A name for the sample.
    fn key(&self, index: usize) -> Option<String>;

    /// As [`EpochWork::read_ahead`].
    fn read_ahead(&self, _cancelled: &Cancellation) -> bool {
        false
    }

    /// As [`EpochWork::parts_ahead`].
    fn parts_ahead(&self) -> usize {
        0
    }

    /// As [`EpochWork::shared_by`].
    fn shared_by(&self, _workers: usize) {}
}

/// A batch with its number in the epoch.
pub(crate) struct Made<B> {
    pub(crate) number: usize,
    pub(crate) result: Result<Outcome<B>, DataError>,
    /// Where the source is after this batch.
    pub(crate) mark: Mark,
    /// Its bytes, where they are counted.
    pub(crate) bytes: Footprint,
}

impl<B> Made<B> {
    pub(crate) fn new(number: usize, result: Result<Outcome<B>, DataError>, mark: Mark) -> Self {
        Self { number, result, mark, bytes: Footprint::default() }
    }
}

/// The outcome of a batch.
pub(crate) enum Outcome<B> {
    Batch {
        batch: B,
        samples: usize,
        /// The bytes of its samples that were in memory at once while it was made, where they are known.
        raw: usize,
        /// The copy to the device, which may still be running.
        uploaded: Option<Uploaded<B>>,
    },
    /// Every sample was bad and skipped.
    Nothing,
    /// The same, and another batch is made in its place.
    Later,
    /// It was delivered before the state was saved.
    Delivered,
}
