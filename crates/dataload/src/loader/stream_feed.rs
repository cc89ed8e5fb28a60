//! Feeds the samples of one batch of a stream to the collate function, and names the bad ones.

use std::cell::Cell;

use crate::batch_samples::{Feed, Prepared};
use crate::deferred::ItemKey;
use crate::loader::fault::{Fault, OnError};
use crate::loader::guard::Place;
use crate::loader::shared::{Caught, Ready, continued};
use crate::{Cancellation, DataError, Deferred, Drawn, IterableDataset};

/// How many of the lowest bits of an item's number hold its position; the bits above hold its shard.
const POSITION_BITS: u32 = 40;

/// Where an item of a stream comes from.
pub(crate) struct Origin {
    pub(crate) shard: usize,
    pub(crate) position: u64,
    /// The number of its lane's pass.
    pub(crate) pass: u64,
    /// The format's name for it.
    pub(crate) key: Option<ItemKey>,
}

impl Origin {
    /// A number that encodes the item's shard and position.
    pub(crate) fn index(&self) -> u64 {
        (self.shard as u64) << POSITION_BITS | self.position
    }

    fn of(index: u64) -> Self {
        let position = index & ((1 << POSITION_BITS) - 1);
        Self { shard: (index >> POSITION_BITS) as usize, position, pass: 0, key: None }
    }

    /// Wraps an error of this item, adding its shard, position and names.
    pub(crate) fn error(&self, dataset: &impl IterableDataset, error: DataError) -> DataError {
        let Self { shard, position, key, .. } = self;
        let names = [dataset.shard_name(*shard), key.as_ref().map(ItemKey::to_string)];
        let names: Vec<String> = names.into_iter().flatten().collect();
        let key = (!names.is_empty()).then(|| names.join(", "));
        DataError::StreamItem { shard: *shard, position: *position, key, error: Box::new(error) }
    }
}

/// A sample of a batch.
pub(crate) enum Sample<S> {
    /// As it was read.
    Raw(Deferred<S>),
    /// As one of several workers has made it; few are.
    Made(Box<Caught<S>>),
}

impl<S> Sample<S> {
    /// Does the work that remains. A panic of other workers' continues here.
    pub(crate) fn get(self) -> Ready<S> {
        match self {
            Self::Raw(sample) => sample.get().map(|sample| (sample, None)),
            Self::Made(outcome) => continued(*outcome),
        }
    }
}

/// Gives the samples of one batch, which have been read already.
pub(crate) struct StreamFeed<'a, D: IterableDataset> {
    pub(crate) dataset: &'a D,
    pub(crate) len: usize,
    pub(crate) samples: std::vec::IntoIter<(Origin, Sample<D::Sample>)>,
    pub(crate) prepared: Option<Prepared>,
    pub(crate) epoch: u64,
    pub(crate) on_error: OnError,
    pub(crate) cancelled: &'a Cancellation,
    pub(crate) place: &'a Cell<Place>,
    pub(crate) faults: Vec<Fault>,
    pub(crate) drawn: Vec<Origin>,
    /// Whether the sample drawn last can still be rejected: each can be rejected once.
    pub(crate) rejectable: bool,
    pub(crate) rejected: usize,
}

impl<D: IterableDataset> StreamFeed<'_, D> {
    /// Adds the item's shard and position to an error that only has its position in the batch, or its number.
    pub(crate) fn named(&self, error: DataError) -> DataError {
        match error {
            DataError::ShapeMismatch { position, .. } | DataError::Misfit { position, .. } => {
                match self.drawn.get(position) {
                    Some(origin) => origin.error(self.dataset, error),
                    None => error,
                }
            }
            DataError::WorkerPanicked { index, message, .. } => {
                let panicked = DataError::other(format!("panicked: {message}"));
                match self.drawn.last().filter(|origin| origin.index() == index as u64) {
                    Some(origin) => origin.error(self.dataset, panicked),
                    // It was rejected before: only its number is left.
                    None => Origin::of(index as u64).error(self.dataset, panicked),
                }
            }
            error => error,
        }
    }
}

impl<D: IterableDataset> Feed<D::Sample> for StreamFeed<'_, D> {
    fn len(&self) -> usize {
        self.len
    }

    fn draw(&mut self) -> Result<Option<Drawn<D::Sample>>, DataError> {
        loop {
            self.cancelled.check()?;
            let Some((origin, sample)) = self.samples.next() else { return Ok(None) };
            let index = origin.index();
            let pass = origin.pass;
            self.drawn.push(origin);
            self.rejectable = true;
            self.place.set(Place::Sample(index));
            match sample.get() {
                Ok((sample, prepared)) => {
                    self.prepared = prepared;
                    return Ok(Some(Drawn::new(sample, index, pass)));
                }
                Err(error) => self.reject(error)?,
            }
        }
    }

    fn prepared(&mut self) -> Option<Prepared> {
        self.prepared.take()
    }

    fn reject(&mut self, error: DataError) -> Result<(), DataError> {
        let rejected = std::mem::take(&mut self.rejectable).then(|| self.drawn.pop()).flatten();
        let Some(origin) = rejected else { return Err(error) };
        let error = origin.error(self.dataset, error);
        if self.on_error == OnError::Fail || error.ends_epoch() {
            return Err(error);
        }
        self.rejected += 1;
        self.faults.push(Fault::of_item(self.epoch, origin.index(), &error));
        Ok(())
    }

    fn cancelled(&self) -> Cancellation {
        self.cancelled.clone()
    }

    fn complete(&mut self) {
        self.place.set(Place::Collate);
    }
}
