//! The stages from drawn samples to a finished batch.

use std::sync::Arc;
use std::time::Instant;

use crate::batch_samples::{Stage, StageTimes};
use crate::loader::fault::{Fault, FaultLog, OnError};
use crate::loader::stats::Counters;
use crate::loader::transfer::{Transfer, Uploaded};
use crate::{BatchSamples, Collate, DataError};

/// The user's collate function and what surrounds it.
pub(crate) struct Stages<C, B> {
    pub(crate) collate: C,
    pub(crate) transfer: Option<Transfer<B>>,
    pub(crate) pinned: bool,
    pub(crate) on_error: OnError,
    pub(crate) counters: Arc<Counters>,
    pub(crate) faults: Arc<FaultLog>,
}

/// What a collate function has made.
pub(crate) struct Collated<B> {
    pub(crate) batch: B,
    /// How many samples the batch counts as, where the collate function set that.
    pub(crate) counted: Option<usize>,
    /// The bytes of its samples that were in memory at once.
    pub(crate) raw: usize,
}

impl<C, B> Stages<C, B> {
    /// Collates a batch.
    pub(crate) fn collate<S>(&self, samples: &mut BatchSamples<'_, S>) -> Result<Collated<B>, DataError>
    where
        C: Collate<S, Batch = B>,
    {
        let _span = tracing::debug_span!("dataload_batch", epoch = samples.epoch(), batch = samples.batch()).entered();
        let (begun, before) = (Instant::now(), samples.times().total());
        let batch = self.collate.collate_from(samples)?;
        let mut times = samples.times();
        times.add(Stage::Collate, begun.elapsed().saturating_sub(times.total() - before));
        let [read, decode, transform, collate, _] = times.0.map(|time| time.as_micros() as u64);
        tracing::debug!(read, decode, transform, collate, "batch made, microseconds by stage");
        self.counters.worked(times);
        Ok(Collated { batch, counted: samples.counted(), raw: samples.raw() })
    }

    /// Starts the transfer of a batch to the device.
    pub(crate) fn send(&self, batch: B) -> Result<(B, Option<Uploaded<B>>), DataError> {
        let Some(transfer) = &self.transfer else { return Ok((batch, None)) };
        let _span = tracing::debug_span!("dataload_transfer").entered();
        let begun = Instant::now();
        let sent = transfer.send(batch)?;
        self.counters.worked(StageTimes::of(Stage::Transfer, begun.elapsed()));
        Ok(sent)
    }

    pub(crate) fn report(&self, faults: impl Iterator<Item = Fault>) {
        for fault in faults {
            self.counters.fault();
            self.faults.add(fault);
        }
    }
}
