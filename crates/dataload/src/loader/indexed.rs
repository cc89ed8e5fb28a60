//! Batches of a dataset with random access.

use std::cell::Cell;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Instant;

use crate::batch_samples::{Stage, StageTimes};
use crate::cache::DeviceStore;
use crate::loader::fault::{Fault, OnError};
use crate::loader::guard::{Place, guarded, survived};
use crate::loader::indexed_feed::{IndexedFeed, Origin};
use crate::loader::other_ranks::RankBatches;
use crate::loader::position::{Bounds, Identity, Position};
use crate::loader::shared::SharedBatch;
use crate::loader::stages::{Collated, Stages};
use crate::loader::torch_order::TorchOrder;
use crate::loader::work::{BatchSource, EpochWork, Lookup, Made, Outcome};
use crate::{
    BatchPlan, BatchSampler, BatchSamples, Cancellation, Collate, DataError, Drawn, FixedBatches, SequentialSampler,
};

/// Limit on how often `Replace` makes a batch again because its samples do not fit together; each time the whole batch
/// is read again. Where seven of ten samples have a different shape, a batch of 64 still has one after 64 attempts in
/// one of 100 million cases.
const MAX_REMAKES: usize = 64;

/// Gives the samples of the epoch that begins at a position, of these batches.
pub(crate) type Open<D> = Box<dyn Fn(&Position, &BatchPlan) -> Result<Arc<D>, DataError> + Send + Sync>;

pub(crate) struct Indexed<D, C: Collate<D::Sample>>
where
    D: Lookup,
{
    pub(crate) open: Open<D>,
    pub(crate) stages: Arc<Stages<C, C::Batch>>,
    pub(crate) batch_sampler: Arc<dyn BatchSampler>,
    pub(crate) identity: Identity,
    /// Whether the order comes from the user's own sampler, which the identity does not describe.
    pub(crate) own_order: bool,
    /// The epoch whose order was last asked for, and the checksum of that order.
    pub(crate) known_order: Mutex<Option<(u64, u32)>>,
    pub(crate) store: Option<Arc<DeviceStore<C::Batch>>>,
    /// Draws the orders as PyTorch's loader does.
    pub(crate) torch_order: Option<TorchOrder>,
    /// Whether several ranks share the data, so that all must make the same number of steps.
    pub(crate) shared: bool,
    /// Where each sample is a batch of this rank's own: an epoch may go on with another number of ranks.
    pub(crate) ranks: Option<RankBatches>,
}

impl<D, C> BatchSource<C::Batch> for Indexed<D, C>
where
    D: Lookup + 'static,
    C: Collate<D::Sample> + 'static,
{
    fn begin(&self, position: &mut Position) -> Result<Arc<dyn EpochWork<C::Batch>>, DataError> {
        let batch_sampler = match &self.ranks {
            Some(ranks) if !position.earlier.is_empty() => {
                Arc::new(FixedBatches::new(SequentialSampler::new(ranks.len(&position.earlier)), 1, false)?)
            }
            _ => self.batch_sampler.clone(),
        };
        let plan = self.plan(position, &batch_sampler)?;
        let pool = match &self.torch_order {
            // The sampler cannot draw this epoch's order again.
            Some(_) if !self.shared && self.stages.on_error != OnError::Fail => {
                plan.batches().flatten().copied().collect()
            }
            _ => Vec::new(),
        };
        let known = OnceLock::new();
        if !pool.is_empty() {
            _ = known.set(pool);
        }
        Ok(Arc::new(IndexedEpoch {
            dataset: (self.open)(position, &plan)?,
            stages: self.stages.clone(),
            store: self.store.clone(),
            plan,
            shared: self.shared,
            batch_sampler,
            pool: known,
            seed: self.identity.seed,
            epoch: position.epoch,
            delivered: position.before.clone(),
            begin: position.batch,
            next: AtomicUsize::new(position.batch),
            workers: AtomicUsize::new(1),
            shared_batches: OnceLock::new(),
        }))
    }

    fn batches(&self, position: &Position) -> Option<usize> {
        Some(self.ranks.map_or_else(|| self.batch_sampler.len(), |ranks| ranks.len(&position.earlier)))
    }

    fn identity(&self) -> Identity {
        self.identity.clone()
    }

    fn bounds(&self) -> Bounds {
        Bounds {
            batches: Some(self.batch_sampler.len()),
            ranks: self.ranks,
            lanes: None,
            generator: self.torch_order.is_some(),
        }
    }

    fn order(&self, epoch: u64) -> Result<Option<u32>, DataError> {
        if !self.own_order {
            return Ok(None);
        }
        let mut known = self.known_order.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, order)) = known.filter(|(of, _)| *of == epoch) {
            return Ok(Some(order));
        }
        // The order of all ranks: a run may resume with another number of ranks. With a generator it is not the one in
        // which samples come, but another sampler is still noticed.
        let pool = sampled(|| self.batch_sampler.pool(epoch))?;
        let order = pool.iter().fold(0, |crc, &index| crc32c::crc32c_append(crc, &(index as u64).to_le_bytes()));
        *known = Some((epoch, order));
        Ok(Some(order))
    }

    fn generator(&self) -> Option<Arc<[u8]>> {
        self.torch_order.as_ref()?.state()
    }
}

impl<D, C> Indexed<D, C>
where
    D: Lookup,
    C: Collate<D::Sample>,
{
    fn plan(&self, position: &mut Position, batches: &Arc<dyn BatchSampler>) -> Result<BatchPlan, DataError> {
        let epoch = position.epoch;
        match &self.torch_order {
            None => sampled(|| batches.plan(epoch)),
            Some(order) => {
                order.draw(&mut position.generator, |generator| sampled(|| batches.plan_from(epoch, generator))?)
            }
        }
    }
}

/// Runs a sampler, which may be the user's, and turns a panic into an error.
fn sampled<T>(sampler: impl FnOnce() -> T) -> Result<T, DataError> {
    survived(sampler).map_err(|message| DataError::other(format!("the sampler panicked: {message}")))
}

/// A batch that is read by several workers, from the index of each sample and its position in the order of all ranks.
pub(super) type SharedIndices<D> = SharedBatch<(usize, u64), <D as Lookup>::Sample>;

pub(super) struct IndexedEpoch<D: Lookup, C, B> {
    pub(super) dataset: Arc<D>,
    stages: Arc<Stages<C, B>>,
    store: Option<Arc<DeviceStore<B>>>,
    plan: BatchPlan,
    pub(super) batch_sampler: Arc<dyn BatchSampler>,
    /// The indices from which substitutes are drawn; made when the first is needed.
    pub(super) pool: OnceLock<Vec<usize>>,
    pub(super) seed: u64,
    pub(super) epoch: u64,
    /// Whether several ranks share the data, so that all must make the same number of steps.
    shared: bool,
    /// Batches that were delivered before the state was saved.
    delivered: BTreeSet<usize>,
    /// The first batch, and the next one that no worker has begun.
    begin: usize,
    next: AtomicUsize,
    workers: AtomicUsize,
    /// The batches that several workers read together: the first, if any, and those at the end that are too few for all
    /// workers.
    shared_batches: OnceLock<Vec<SharedIndices<D>>>,
}

impl<D, C> EpochWork<C::Batch> for IndexedEpoch<D, C, C::Batch>
where
    D: Lookup + 'static,
    C: Collate<D::Sample> + 'static,
{
    fn make(&self, cancelled: &Cancellation) -> Option<Made<C::Batch>> {
        let number = self.claim(cancelled)?;
        if self.delivered.contains(&number) {
            return Some(Made::new(number, Ok(Outcome::Delivered), None));
        }
        let result = match self.assemble(number, cancelled) {
            Err(DataError::Cancelled) if cancelled.is_cancelled() => return None,
            result => result,
        };
        Some(Made::new(number, result, None))
    }

    fn read_ahead(&self, cancelled: &Cancellation) -> bool {
        let begun = Instant::now();
        let read = self.dataset.read_ahead(cancelled);
        self.stages.counters.worked(StageTimes::of(Stage::Read, begun.elapsed()));
        read
    }

    fn parts_ahead(&self) -> usize {
        self.dataset.parts_ahead()
    }

    fn shared_by(&self, workers: usize) {
        self.workers.store(workers, Relaxed);
        self.dataset.shared_by(workers);
    }
}

impl<D, C> IndexedEpoch<D, C, C::Batch>
where
    D: Lookup,
    C: Collate<D::Sample>,
{
    /// The number of the batch that this worker makes next; `None` where no batch is left.
    fn claim(&self, cancelled: &Cancellation) -> Option<usize> {
        let shared = self.shared_batches();
        let made_here = |batch: &&SharedIndices<D>| self.help(batch, cancelled);
        if let Some(first) = shared.first().filter(made_here) {
            return Some(first.number);
        }
        let end = self.plan.len() - shared.len().saturating_sub(1);
        let begin = |number: usize| (number < end).then_some(number + 1);
        match self.next.fetch_update(Relaxed, Relaxed, begin) {
            Ok(number) => Some(number),
            Err(_) => shared.iter().skip(1).find(made_here).map(|batch| batch.number),
        }
    }

    /// The first batch, for which all workers would wait otherwise, and so many of the last ones that those between give
    /// each worker the same number.
    fn shared_batches(&self) -> &[SharedIndices<D>] {
        let share = || {
            let (workers, end) = (self.workers.load(Relaxed), self.plan.len());
            let is_read =
                self.store.is_none() && self.stages.collate.reads_samples() && !self.delivered.contains(&self.begin);
            let batch = |number: usize| SharedBatch::new(number, self.plan.draws(number).collect());
            let first = (is_read && workers > 1).then(|| batch(self.begin)).filter(|first| first.len > 1);
            let Some(first) = first else { return Vec::new() };
            self.next.store(self.begin + 1, Relaxed);
            let left = if self.delivered.is_empty() { end.saturating_sub(self.begin + 1) % workers } else { 0 };
            let last: Vec<_> = (end - left..end).map(batch).collect();
            // Nobody would make a batch without samples.
            let all_have_samples = last.iter().all(|batch| batch.len > 0);
            std::iter::once(first).chain(last.into_iter().filter(|_| all_have_samples)).collect()
        };
        self.shared_batches.get_or_init(share)
    }

    /// Reads samples of a shared batch with the other workers; true where this one makes it.
    fn help(&self, batch: &SharedIndices<D>, cancelled: &Cancellation) -> bool {
        batch.help(&self.stages, self.epoch, cancelled, |(index, place)| {
            DataError::check_index(index, self.dataset.len())?;
            let sample = self.dataset.get(index, false, cancelled)?;
            Ok((sample, Drawn::new((), index as u64, place).draw()))
        })
    }

    /// Makes a batch. Where the collate function reports only at the end which sample does not fit, the batch is made
    /// again without that sample. A batch that loses all samples is filled with substitutes where other ranks make that
    /// step too.
    fn assemble(&self, number: usize, cancelled: &Cancellation) -> Result<Outcome<C::Batch>, DataError> {
        let indices = self.plan.batch(number).unwrap_or_default();
        if let Some(store) = &self.store
            && let Some(batch) = store.get(indices)?
        {
            return Ok(Outcome::Batch { batch, samples: indices.len(), raw: 0, uploaded: None });
        }
        let place = Cell::new(Place::Collate);
        let mut unfit: Vec<Fault> = Vec::new();
        let mut indices_unfit = BTreeSet::new();
        let (mut policy, mut remakes) = (self.stages.on_error, 0);
        loop {
            let origins = self.plan.draws(number).map(Origin::new).collect();
            let shared = self.shared_batches().iter().find(|batch| batch.number == number);
            let mut feed = IndexedFeed::new(self, policy, shared, origins, cancelled, &place, &indices_unfit);
            let result = guarded(
                number,
                &place,
                |index| self.dataset.key(index as usize),
                || {
                    let mut samples = BatchSamples::new(&mut feed, self.epoch, number, self.stages.pinned);
                    self.stages.collate(&mut samples)
                },
            );
            let IndexedFeed { drawn, faults, origins: left, .. } = feed;
            match result {
                Err(error) if may_remake(policy, remakes) && !culprits(&error, &drawn).is_empty() => {
                    remakes += 1;
                    // Samples known to be bad are neither read nor reported again.
                    indices_unfit.extend(faults.iter().map(|fault| fault.index as usize));
                    unfit.extend(faults);
                    for index in culprits(&error, &drawn) {
                        indices_unfit.insert(index);
                        unfit.push(Fault::new(self.epoch, index as u64, self.dataset.key(index), error.innermost()));
                    }
                }
                Err(DataError::EmptyBatch)
                    if policy == OnError::Skip && self.shared && faults.len() + unfit.len() > 0 =>
                {
                    policy = OnError::Replace;
                    indices_unfit.extend(indices);
                    unfit.extend(faults);
                }
                result => {
                    // Nobody needs the rest of the batch any more, be it made or not.
                    match shared {
                        Some(batch) => drop(batch.take_all()),
                        None => left.for_each(|origin| self.dataset.pass_over(origin.index)),
                    }
                    let bad = faults.len() + unfit.len();
                    self.stages.report(faults.into_iter().chain(unfit));
                    return match result {
                        Ok(collated) => guarded(number, &place, |_| None, || self.finish(collated, &drawn)),
                        Err(DataError::EmptyBatch) if bad > 0 => Ok(Outcome::Nothing),
                        Err(error) => Err(self.named(error, &drawn)),
                    };
                }
            }
        }
    }

    /// Starts the batch's transfer and, with `cache(OnDevice)`, keeps its samples there.
    fn finish(&self, collated: Collated<C::Batch>, drawn: &[usize]) -> Result<Outcome<C::Batch>, DataError> {
        let Collated { batch, counted, raw } = collated;
        let (batch, mut uploaded) = self.stages.send(batch)?;
        if let Some(store) = &self.store {
            if let Some(uploaded) = &mut uploaded {
                uploaded.adopt_ahead(&batch)?;
            }
            store.put(drawn, &batch)?;
        }
        Ok(Outcome::Batch { batch, samples: counted.unwrap_or(drawn.len()), raw, uploaded })
    }

    /// Adds the sample's index to an error that only knows its position in the batch.
    fn named(&self, error: DataError, drawn: &[usize]) -> DataError {
        match error {
            DataError::ShapeMismatch { position, .. } | DataError::Misfit { position, .. }
                if position < drawn.len() =>
            {
                self.of_sample(drawn[position], error)
            }
            error => error,
        }
    }
}

impl<D: Lookup, C, B> IndexedEpoch<D, C, B> {
    pub(super) fn of_sample(&self, index: usize, error: DataError) -> DataError {
        DataError::Sample { index, key: self.dataset.key(index), error: Box::new(error) }
    }
}

/// Whether a batch whose samples do not fit together is made again. `Skip` needs no limit: the batch gets smaller each
/// time.
fn may_remake(policy: OnError, remakes: usize) -> bool {
    match policy {
        OnError::Fail => false,
        OnError::Skip => true,
        OnError::Replace => remakes < MAX_REMAKES,
    }
}

/// The indices of the samples that a collate function's error blames.
fn culprits(error: &DataError, drawn: &[usize]) -> BTreeSet<usize> {
    let at = |position: &usize| drawn.get(*position).copied();
    match error {
        DataError::ShapeMismatch { position, others, .. } | DataError::Misfit { position, others, .. } => {
            [position].into_iter().chain(others).filter_map(at).collect()
        }
        DataError::Sample { index, .. } if drawn.contains(index) => BTreeSet::from([*index]),
        _ => BTreeSet::new(),
    }
}
