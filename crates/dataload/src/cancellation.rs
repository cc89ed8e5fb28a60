//! A flag that says that work is no longer wanted.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use crate::DataError;

/// Whether work is still wanted: a loader cancels it when its epoch is dropped, or has timed out.
///
/// Clones share one flag. The default is never cancelled.
#[derive(Clone, Debug, Default)]
pub struct Cancellation(Option<Arc<AtomicBool>>);

impl Cancellation {
    /// A flag that [`cancel`](Self::cancel) can set.
    pub fn new() -> Self {
        Self(Some(Arc::default()))
    }

    /// Cancels the work for all clones of this; without effect on the default.
    pub fn cancel(&self) {
        if let Some(cancelled) = &self.0 {
            cancelled.store(true, Relaxed);
        }
    }

    /// Whether the work was cancelled. Costs one atomic load, so it can be asked often.
    pub fn is_cancelled(&self) -> bool {
        self.0.as_ref().is_some_and(|cancelled| cancelled.load(Relaxed))
    }

    /// [`is_cancelled`](Self::is_cancelled) as an error, for `?`.
    ///
    /// # Errors
    /// [`DataError::Cancelled`]
    pub fn check(&self) -> Result<(), DataError> {
        if self.is_cancelled() { Err(DataError::Cancelled) } else { Ok(()) }
    }
}
