//! What a loader asks of the thing that makes its batches.

use std::sync::Arc;

use crate::loader::position::{Bounds, Identity, Mark, Position};
use crate::loader::transfer::Uploaded;
use crate::{Cancellation, DataError};

/// Makes the batches of any epoch.
pub(crate) trait Source<B>: Send + Sync {
    /// What the threads of one epoch share, from `position` on.
    fn begin(&self, position: &Position) -> Result<Arc<dyn EpochWork<B>>, DataError>;

    /// How many batches an epoch has, where that is known beforehand.
    fn batches(&self) -> Option<usize>;

    /// What has to agree for a saved position to mean the same batches.
    fn identity(&self) -> Identity;

    /// What a saved position may say.
    fn bounds(&self) -> Bounds;

    /// A checksum of an epoch's order, the same on every rank, where the identity does not say it all.
    fn order(&self, _epoch: u64) -> Result<Option<u32>, DataError> {
        Ok(None)
    }
}

/// One epoch, worked at by any number of threads.
pub(crate) trait EpochWork<B>: Send + Sync {
    /// Makes the next batch that nobody has begun; none when nothing is left, or `cancelled` has been set.
    fn make(&self, cancelled: &Cancellation) -> Option<Made<B>>;
}

/// A batch with its place in the epoch.
pub(crate) struct Made<B> {
    pub(crate) number: usize,
    pub(crate) result: Result<Content<B>, DataError>,
    /// Where the source is after this batch.
    pub(crate) mark: Mark,
}

/// What became of a batch.
pub(crate) enum Content<B> {
    Batch {
        batch: B,
        samples: usize,
        /// The copy to the device that is still under way.
        uploaded: Option<Uploaded<B>>,
    },
    /// Every sample was bad and passed over.
    Nothing,
    /// The same, and another batch takes its place.
    Later,
    /// It was delivered before the state was saved.
    Delivered,
}
