//! What happens to a profile that is ready.

use std::sync::Arc;

use crate::{Profile, ProfileError};

/// Takes the profile of each window; any closure that takes one does.
pub trait TraceHandler {
    /// A profile is ready. It may be kept, and may go to another thread.
    ///
    /// # Errors
    /// Whatever the handler meets with; the step or stop that brought the profile returns it, and the profiler goes on.
    fn trace_ready(&mut self, profile: Arc<Profile>) -> Result<(), ProfileError>;

    /// The profiler stops: what is done in the background has to end.
    ///
    /// # Errors
    /// Whatever that met with.
    fn finish(&mut self) -> Result<(), ProfileError> {
        Ok(())
    }
}

impl<F: FnMut(Arc<Profile>) -> Result<(), ProfileError>> TraceHandler for F {
    fn trace_ready(&mut self, profile: Arc<Profile>) -> Result<(), ProfileError> {
        self(profile)
    }
}
