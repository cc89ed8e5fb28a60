//! One batch from start to end: read its samples, collate them, and let no panic out.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::{BatchPlan, Collate, DataError, Dataset};

/// What every thread needs to make any batch of one epoch.
pub(crate) struct Pipeline<D, C> {
    pub(crate) stages: Arc<Stages<D, C>>,
    pub(crate) plan: BatchPlan,
}

/// The user's code.
pub(crate) struct Stages<D, C> {
    pub(crate) dataset: D,
    pub(crate) collate: C,
}

/// Where in the user's code a thread is, so that a panic can be told where it came from.
#[derive(Clone, Copy)]
enum Place {
    Sample(usize),
    Collate,
}

impl<D: Dataset, C: Collate<D::Sample>> Pipeline<D, C> {
    /// Makes the batch with this number, or nothing when `cancelled` is set meanwhile.
    pub(crate) fn assemble(&self, number: usize, cancelled: &AtomicBool) -> Option<Result<C::Batch, DataError>> {
        let place = Cell::new(Place::Collate);
        // After a panic the user's code may have broken state of its own behind shared references; that is the same as
        // for any thread that panics beside others, and the epoch ends here.
        catch_unwind(AssertUnwindSafe(|| self.read_and_collate(number, &place, cancelled))).unwrap_or_else(|payload| {
            let message = message_of(payload);
            Some(Err(match place.get() {
                Place::Sample(index) => DataError::WorkerPanicked { index, message },
                Place::Collate => DataError::CollatePanicked { batch: number, message },
            }))
        })
    }

    fn read_and_collate(
        &self,
        number: usize,
        place: &Cell<Place>,
        cancelled: &AtomicBool,
    ) -> Option<Result<C::Batch, DataError>> {
        let indices = self.plan.batch(number).unwrap_or_default();
        let mut samples = Vec::with_capacity(indices.len());
        for &index in indices {
            if cancelled.load(Ordering::Relaxed) {
                return None;
            }
            place.set(Place::Sample(index));
            match self.read(index) {
                Ok(sample) => samples.push(sample),
                Err(error) => return Some(Err(DataError::Sample { index, error: Box::new(error) })),
            }
        }
        place.set(Place::Collate);
        Some(self.stages.collate.collate(samples).map_err(|error| match error {
            DataError::ShapeMismatch { position, .. } if position < indices.len() => {
                DataError::Sample { index: indices[position], error: Box::new(error) }
            }
            error => error,
        }))
    }

    fn read(&self, index: usize) -> Result<D::Sample, DataError> {
        let len = self.stages.dataset.len();
        if index >= len {
            return Err(DataError::IndexOutOfRange { index, len });
        }
        self.stages.dataset.get(index)
    }
}

fn message_of(payload: Box<dyn Any + Send>) -> String {
    let payload = match payload.downcast::<String>() {
        Ok(message) => return *message,
        Err(payload) => payload,
    };
    match payload.downcast::<&'static str>() {
        Ok(message) => (*message).to_owned(),
        Err(payload) => {
            // Dropping a foreign payload could panic in its turn and end the worker, so it is leaked.
            std::mem::forget(payload);
            "a panic without a message".to_owned()
        }
    }
}
