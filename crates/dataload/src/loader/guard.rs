//! Catches panics of the user's code in worker threads.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::DataError;

/// Which part of the user's code a thread is running, so that an error can say where a panic came from.
#[derive(Clone, Copy)]
pub(crate) enum Place {
    /// At the sample with this index (in a stream, this number).
    Sample(u64),
    /// At the whole batch.
    Collate,
}

/// Runs `body`, and turns a panic into an error that names its place; `key` returns the name of a sample.
pub(crate) fn guarded<T>(
    batch: usize,
    place: &Cell<Place>,
    key: impl Fn(u64) -> Option<String>,
    body: impl FnOnce() -> Result<T, DataError>,
) -> Result<T, DataError> {
    // A panic may leave the user's shared state inconsistent, as when any thread of a program panics; the epoch ends
    // here.
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

/// Runs `body`; its panic becomes an error, the panic's message.
pub(crate) fn survived<T>(body: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(body)).map_err(message_of)
}

/// The message of a panic.
pub(crate) fn message_of(payload: Box<dyn Any + Send>) -> String {
    let payload = match payload.downcast::<String>() {
        Ok(message) => return *message,
        Err(payload) => payload,
    };
    match payload.downcast::<&'static str>() {
        Ok(message) => (*message).to_owned(),
        Err(payload) => {
            // Dropping an unknown payload could panic again and end the worker, so it is leaked.
            std::mem::forget(payload);
            "a panic without a message".to_owned()
        }
    }
}
