//! One epoch of batches, made by its own threads.

use std::iter::FusedIterator;
use std::sync::Arc;
use std::vec;

use overdrive_core::{Activity, activity};

use super::batches::{ParquetBatches, Plan, gather};
use super::in_order::InOrder;
use crate::columns::{Array, Table};
use crate::{Cancellation, DataError};

/// The batches of one epoch, in order; made by [`ParquetBatches::epoch`].
///
/// Each thread decodes a window (a few row groups, see [`ParquetBatches::window`]) and makes its batches. So memory
/// holds one decoded window per thread, and the finished batches of about as many windows. An error ends the epoch.
/// Dropping the epoch stops the threads after the few rows that they are decoding, or the batch that they are making, and
/// joins them.
#[must_use = "its threads are already decoding; an epoch that is not iterated wastes their work"]
pub struct ParquetEpoch {
    batches: ParquetBatches,
    windows: Windows,
    ready: vec::IntoIter<Piece>,
    /// The beginning of a batch that continues in the next window.
    begun: Option<Vec<Array>>,
    /// The number of the next batch.
    number: usize,
}

enum Windows {
    Coming(InOrder<Vec<Piece>>),
    Failed(DataError),
    Ended,
}

/// What one window contributes to a batch: all of its rows, or a part to be joined with the neighbouring windows'.
enum Piece {
    Whole(Table),
    Part(Vec<Array>),
}

impl ParquetEpoch {
    pub(super) fn start(batches: ParquetBatches, epoch: u64, number: usize) -> Self {
        let windows = Self::spawn(&batches, epoch, number).unwrap_or_else(Windows::Failed);
        Self { batches, windows, ready: Vec::new().into_iter(), begun: None, number }
    }

    fn spawn(batches: &ParquetBatches, epoch: u64, number: usize) -> Result<Windows, DataError> {
        let plan = batches.plan(epoch)?;
        let first_place = batches.places(number).start;
        let first = plan.windows.partition_point(|(_, places)| places.end <= first_place);
        let left = plan.windows.len() - first;
        if number >= batches.len() || left == 0 {
            return Ok(Windows::Ended);
        }
        let threads = batches.dataset.options.threads;
        // With fewer windows than threads, several threads decode one window.
        let threads_each = (threads / left).max(1);
        let makers = batches.clone();
        let make = Arc::new(move |window: usize, cancelled: &Cancellation| {
            makers.pieces(&plan, window, number, threads_each, cancelled)
        });
        // One window more than threads, so that a thread that finishes has another to begin.
        Ok(Windows::Coming(InOrder::start(first..first + left, threads, threads + 1, make)?))
    }

    fn next_batch(&mut self) -> Result<Option<Table>, DataError> {
        if self.number >= self.batches.len() {
            return Ok(None);
        }
        loop {
            match self.ready.next() {
                Some(Piece::Whole(table)) => return Ok(Some(table)),
                Some(Piece::Part(part)) => {
                    let batch = match self.begun.take() {
                        None => part,
                        Some(begun) => {
                            let columns = begun.iter().zip(&part);
                            columns.map(|(begun, part)| Array::joined(&[begun, part])).collect::<Result<_, _>>()?
                        }
                    };
                    let rows = batch.first().map_or(0, |array| array.rows);
                    let expected_rows = self.batches.places(self.number).len();
                    if rows == expected_rows {
                        return self.batches.dataset.table(batch, rows, false).map(Some);
                    }
                    self.begun = Some(batch);
                }
                None => match std::mem::replace(&mut self.windows, Windows::Ended) {
                    Windows::Coming(mut windows) => match windows.next() {
                        Some(pieces) => {
                            self.ready = pieces?.into_iter();
                            self.windows = Windows::Coming(windows);
                        }
                        None => return Ok(None),
                    },
                    Windows::Failed(error) => return Err(error),
                    Windows::Ended => return Ok(None),
                },
            }
        }
    }
}

impl ParquetBatches {
    /// The batches of a window, and its parts of batches that begin before it or end after it.
    fn pieces(
        &self,
        plan: &Plan,
        window: usize,
        from: usize,
        threads: usize,
        cancelled: &Cancellation,
    ) -> Result<Vec<Piece>, DataError> {
        let window = self.window_of(plan, window, threads, cancelled)?;
        let mut pieces = Vec::new();
        for number in self.batches_of(&window.places) {
            cancelled.check()?;
            if number < from {
                continue;
            }
            let places = self.places(number);
            let arrays = gather(std::iter::once(&window), &places, false)?;
            let is_whole = window.places.start <= places.start && places.end <= window.places.end;
            pieces.push(match is_whole {
                true => Piece::Whole(self.dataset.table(arrays, places.len(), false)?),
                false => Piece::Part(arrays),
            });
        }
        // Keep the buffers for reuse, at most those of two windows per thread. Each thread has one window in progress.
        let most = 2 * self.dataset.options.threads * window.columns.iter().map(Vec::len).sum::<usize>();
        window.columns.into_iter().flatten().for_each(|array| self.spare.give(array.values, most));
        Ok(pieces)
    }
}

impl Iterator for ParquetEpoch {
    type Item = Result<Table, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        // All epochs of these batches share `spare`, so its address identifies the loader.
        let mut waiting = activity(|| Activity::NextBatch(Arc::as_ptr(&self.batches.spare).addr()));
        let batch = self.next_batch().transpose();
        match &batch {
            Some(Ok(_)) => {
                waiting.set_samples(self.batches.places(self.number).len() as u64);
                self.number += 1;
            }
            Some(Err(_)) | None => {
                self.number = self.batches.len();
                self.windows = Windows::Ended;
            }
        }
        batch
    }

    /// At most the remaining batches: an error may end the epoch earlier.
    fn size_hint(&self) -> (usize, Option<usize>) {
        (0, Some(self.batches.len().saturating_sub(self.number)))
    }
}

impl FusedIterator for ParquetEpoch {}
