//! Reads the samples of one batch of a dataset, and applies the fault policy.

use std::cell::Cell;
use std::collections::BTreeSet;

use crate::batch_samples::{Feed, Prepared};
use crate::loader::fault::{Fault, OnError};
use crate::loader::guard::Place;
use crate::loader::indexed::{IndexedEpoch, SharedIndices};
use crate::loader::order::{Domain, below};
use crate::loader::shared::Ready;
use crate::loader::work::Lookup;
use crate::{Cancellation, DataError, Drawn};

/// The most substitutes that are drawn for one bad sample. Where nine of ten samples are bad, all substitutes are bad
/// for one sample in 500 billion (0.9^256 is 1.9e-12); where all are bad, the epoch ends after this many reads.
const MAX_SUBSTITUTES: u64 = 256;

/// A draw from the epoch's order, or a substitute for one.
#[derive(Clone, Copy)]
pub(super) struct Origin {
    pub(super) index: usize,
    /// Its position in the order of all ranks.
    place: u64,
    /// How many substitutes were drawn for it.
    substitutes: u64,
}

impl Origin {
    pub(super) fn new((index, place): (usize, u64)) -> Self {
        Self { index, place, substitutes: 0 }
    }
}

/// Reads the samples of one batch, and applies the fault policy.
pub(super) struct IndexedFeed<'a, D: Lookup, C, B> {
    work: &'a IndexedEpoch<D, C, B>,
    policy: OnError,
    /// Where other workers have read samples of this batch.
    shared: Option<&'a SharedIndices<D>>,
    prepared: Option<Prepared>,
    /// Those that the collate function has not asked for.
    pub(super) origins: std::vec::IntoIter<Origin>,
    len: usize,
    cancelled: &'a Cancellation,
    place: &'a Cell<Place>,
    /// The draw that needs a substitute next.
    again: Option<Origin>,
    /// The draw of the sample drawn last.
    origin: Origin,
    pub(super) drawn: Vec<usize>,
    /// Whether the sample drawn last can still be rejected: each can be rejected once.
    rejectable: bool,
    /// Samples that earlier attempts at this batch could not read or use.
    unfit: &'a BTreeSet<usize>,
    pub(super) faults: Vec<Fault>,
}

impl<'a, D: Lookup, C, B> IndexedFeed<'a, D, C, B> {
    pub(super) fn new(
        work: &'a IndexedEpoch<D, C, B>,
        policy: OnError,
        shared: Option<&'a SharedIndices<D>>,
        origins: Vec<Origin>,
        cancelled: &'a Cancellation,
        place: &'a Cell<Place>,
        unfit: &'a BTreeSet<usize>,
    ) -> Self {
        let (len, drawn, faults) = (origins.len(), Vec::with_capacity(origins.len()), Vec::new());
        let (origins, origin) = (origins.into_iter(), Origin::new((0, 0)));
        Self {
            work,
            policy,
            shared,
            prepared: None,
            origins,
            len,
            cancelled,
            place,
            again: None,
            origin,
            drawn,
            rejectable: false,
            unfit,
            faults,
        }
    }

    /// The draw's index, or the index of its current substitute.
    fn substitute(&self, origin: Origin) -> usize {
        let IndexedEpoch { epoch, seed, batch_sampler, .. } = self.work;
        let Origin { index, place, substitutes } = origin;
        if substitutes == 0 {
            return index;
        }
        let pool = self.work.pool.get_or_init(|| batch_sampler.pool(*epoch));
        match pool.len() {
            0 => index,
            len => pool[below(len, *seed, Domain::Substitute, &[*epoch, place, substitutes])],
        }
    }

    /// The index of the next draw or substitute that no earlier attempt found unfit.
    fn next_index(&mut self) -> Result<Option<usize>, DataError> {
        while let Some(origin) = self.again.take().or_else(|| self.origins.next()) {
            self.cancelled.check()?;
            self.origin = origin;
            let (index, len) = (self.substitute(origin), self.work.dataset.len());
            self.place.set(Place::Sample(index as u64));
            if !self.unfit.contains(&index) {
                if index < len {
                    return Ok(Some(index));
                }
                self.pass_over(index, DataError::IndexOutOfRange { index, len })?;
            } else if origin.substitutes == MAX_SUBSTITUTES {
                return Err(self.work.of_sample(index, DataError::other("no substitute fits into the batch")));
            } else {
                self.replace();
            }
        }
        Ok(None)
    }

    fn read(&self, index: usize) -> Ready<D::Sample> {
        let is_substitute = self.origin.substitutes > 0;
        let position = self.len - self.origins.len() - 1;
        let shared = self.shared.filter(|_| !is_substitute).and_then(|batch| batch.take(position));
        shared.unwrap_or_else(|| Ok((self.work.dataset.get(index, is_substitute, self.cancelled)?, None)))
    }

    /// Applies the policy to a bad sample.
    fn pass_over(&mut self, index: usize, error: DataError) -> Result<(), DataError> {
        if matches!(error, DataError::Cancelled) {
            // Given up with its epoch, it is not bad.
            self.cancelled.check()?;
        }
        let used_up = self.policy == OnError::Replace && self.origin.substitutes == MAX_SUBSTITUTES;
        if self.policy == OnError::Fail || used_up || error.ends_epoch() {
            return Err(match error {
                named @ DataError::Sample { .. } => named,
                error => self.work.of_sample(index, error),
            });
        }
        self.faults.push(Fault::new(self.work.epoch, index as u64, self.work.dataset.key(index), &error));
        self.replace();
        Ok(())
    }

    fn replace(&mut self) {
        let next = Origin { substitutes: self.origin.substitutes + 1, ..self.origin };
        self.again = (self.policy == OnError::Replace).then_some(next);
    }
}

impl<D: Lookup, C, B> Feed<D::Sample> for IndexedFeed<'_, D, C, B> {
    fn len(&self) -> usize {
        self.len
    }

    fn draw(&mut self) -> Result<Option<Drawn<D::Sample>>, DataError> {
        while let Some(index) = self.next_index()? {
            match self.read(index) {
                Ok((sample, prepared)) => {
                    self.prepared = prepared;
                    self.drawn.push(index);
                    self.rejectable = true;
                    return Ok(Some(Drawn::new(sample, index as u64, self.origin.place)));
                }
                Err(error) => self.pass_over(index, error)?,
            }
        }
        Ok(None)
    }

    fn bytes(&self, sample: &D::Sample) -> usize {
        self.work.dataset.bytes(sample)
    }

    fn indices(&mut self) -> Result<Vec<u64>, DataError> {
        let begun = self.drawn.len();
        while let Some(index) = self.next_index()? {
            self.drawn.push(index);
        }
        Ok(self.drawn[begun..].iter().map(|&index| index as u64).collect())
    }

    fn prepared(&mut self) -> Option<Prepared> {
        self.prepared.take()
    }

    fn reject(&mut self, error: DataError) -> Result<(), DataError> {
        match std::mem::take(&mut self.rejectable).then(|| self.drawn.pop()).flatten() {
            Some(index) => self.pass_over(index, error),
            None => Err(error),
        }
    }

    fn cancelled(&self) -> Cancellation {
        self.cancelled.clone()
    }

    fn complete(&mut self) {
        self.place.set(Place::Collate);
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use super::*;
    use crate::loader::builder::Options;
    use crate::loader::indexed::Indexed;
    use crate::loader::position::{Identity, Position};
    use crate::loader::work::BatchSource;
    use crate::{FixedBatches, SequentialSampler};

    /// Its epoch is dropped while the first sample is read.
    struct Dropped;

    impl Lookup for Dropped {
        type Sample = usize;

        fn len(&self) -> usize {
            8
        }

        fn get(&self, index: usize, _is_substitute: bool, cancelled: &Cancellation) -> Result<usize, DataError> {
            cancelled.cancel();
            cancelled.check().map(|()| index)
        }

        fn key(&self, _index: usize) -> Option<String> {
            None
        }
    }

    #[test]
    fn a_sample_that_was_given_up_is_not_bad() -> Result<(), DataError> {
        for on_error in [OnError::Fail, OnError::Skip, OnError::Replace] {
            let mut options = Options::default();
            options.on_error = on_error;
            let (stages, _) = options.assemble(|samples: Vec<usize>| Ok::<_, DataError>(samples))?;
            let faults = stages.faults.clone();
            let source = Indexed {
                open: Box::new(|_, _| Ok(Arc::new(Dropped))),
                stages: Arc::new(stages),
                batch_sampler: Arc::new(FixedBatches::new(SequentialSampler::new(8), 1, false)?),
                identity: Identity { stream: false, len: 8, global_batch_size: 1, seed: 0, order: Vec::new() },
                own_order: false,
                known_order: Mutex::default(),
                store: None,
                torch_order: None,
                shared: false,
                ranks: None,
            };
            let work = source.begin(&mut Position::default())?;
            assert!(work.make(&Cancellation::new()).is_none(), "{on_error:?}");
            assert!(faults.latest().is_empty(), "{on_error:?}");
        }
        Ok(())
    }
}
