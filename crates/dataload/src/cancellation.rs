//! Says that nobody waits for the work any more.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::DataError;

/// Whether work is still wanted: a loader cancels it when its epoch is dropped, or has timed out.
///
/// Clones tell the same. The default is never cancelled.
#[derive(Clone, Debug, Default)]
pub struct Cancellation(Option<Arc<AtomicBool>>);

impl Cancellation {
    /// One that [`cancel`](Self::cancel) can set.
    pub fn new() -> Self {
        Self(Some(Arc::default()))
    }

    /// Says that the work is not wanted any more, to whoever has a clone of this; without effect on the default.
    pub fn cancel(&self) {
        if let Some(cancelled) = &self.0 {
            cancelled.store(true, Relaxed);
        }
    }

    /// Whether the work is not wanted any more. Costs as much as reading a number, so that it can be asked often.
    pub fn is_cancelled(&self) -> bool {
        self.0.as_ref().is_some_and(|cancelled| cancelled.load(Relaxed))
    }

    /// The same as an error, for `?`.
    ///
    /// # Errors
    /// [`DataError::Cancelled`]
    pub fn check(&self) -> Result<(), DataError> {
        if self.is_cancelled() { Err(DataError::Cancelled) } else { Ok(()) }
    }
}
