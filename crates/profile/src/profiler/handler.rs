//! What happens to a profile that is ready.

use std::sync::Arc;

use crate::{Profile, ProfileError};

/// Takes the profile of each window. Closures that take a profile implement it.
pub trait TraceHandler {
    /// Called when a profile is ready. It may be kept or sent to another thread.
    ///
    /// # Errors
    /// Any error of the handler: the `step` or `stop` that ended the window returns it, and the profiler continues.
    fn trace_ready(&mut self, profile: Arc<Profile>) -> Result<(), ProfileError>;

    /// Called when the profiler stops: waits for work in the background.
    ///
    /// # Errors
    /// Errors of that work.
    fn finish(&mut self) -> Result<(), ProfileError> {
        Ok(())
    }
}

impl<F: FnMut(Arc<Profile>) -> Result<(), ProfileError>> TraceHandler for F {
    fn trace_ready(&mut self, profile: Arc<Profile>) -> Result<(), ProfileError> {
        self(profile)
    }
}
