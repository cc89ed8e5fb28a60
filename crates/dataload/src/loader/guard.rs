//! Lets no panic of the user's code out of a thread.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::DataError;

/// Where in the user's code a thread is, so that a panic can be told where it came from.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    /// At the sample with this index, or this number in a stream.
    Sample(u64),
    /// At the whole batch.
    Collate,
}

/// Runs `body`, and turns a panic into an error that names its place; `key` gives the name of a sample.
pub(crate) fn guarded<T>(
    batch: usize,
    place: &Cell<Place>,
    key: impl Fn(u64) -> Option<String>,
    body: impl FnOnce() -> Result<T, DataError>,
) -> Result<T, DataError> {
    // After a panic the user's code may have broken state of its own behind shared references; that is the same as for
    // any thread that panics beside others, and the epoch ends here.
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        let message = message_of(payload);
        Err(match place.get() {
            Place::Sample(index) => {
                let key = catch_unwind(AssertUnwindSafe(|| key(index))).unwrap_or_default();
                DataError::WorkerPanicked { index: index as usize, key, message }
            }
            Place::Collate => DataError::CollatePanicked { batch, message },
        })
    })
}

/// The text that a panic was raised with.
pub(crate) fn message_of(payload: Box<dyn Any + Send>) -> String {
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
