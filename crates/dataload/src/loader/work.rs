//! What a loader needs from the source of its batches.

use std::sync::Arc;

use crate::loader::position::{Bounds, Identity, Mark, Position};
use crate::loader::transfer::Uploaded;
use crate::{Cancellation, DataError};

/// Makes the batches of each epoch.
pub(crate) trait Source<B>: Send + Sync {
    /// Starts an epoch at `position`, which gets the state of the generator that its order is drawn from; its threads
    /// share the result.
    fn begin(&self, position: &mut Position) -> Result<Arc<dyn EpochWork<B>>, DataError>;

    /// How many batches an epoch has, where that is known beforehand.
    fn batches(&self) -> Option<usize>;

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
}

/// A batch with its number in the epoch.
pub(crate) struct Made<B> {
    pub(crate) number: usize,
    pub(crate) result: Result<Content<B>, DataError>,
    /// Where the source is after this batch.
    pub(crate) mark: Mark,
}

/// The outcome of a batch.
pub(crate) enum Content<B> {
    Batch {
        batch: B,
        samples: usize,
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
