//! Samples whose last steps are left to whoever has time for them.

use std::fmt;

use crate::DataError;

/// A sample that has been read, and what is still to be done to it.
pub struct Deferred<S>(Work<S>);

enum Work<S> {
    None(S),
    Left(Box<dyn FnOnce() -> Result<S, DataError> + Send>),
}

impl<S> Deferred<S> {
    /// A sample that is as it should be.
    pub fn ready(sample: S) -> Self {
        Self(Work::None(sample))
    }

    /// A sample that `work` makes, on any thread.
    pub fn later(work: impl FnOnce() -> Result<S, DataError> + Send + 'static) -> Self {
        Self(Work::Left(Box::new(work)))
    }

    /// The sample, after the work that was left.
    ///
    /// # Errors
    /// That work's.
    pub fn get(self) -> Result<S, DataError> {
        match self.0 {
            Work::None(sample) => Ok(sample),
            Work::Left(work) => work(),
        }
    }
}

impl<S> fmt::Debug for Deferred<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if matches!(self.0, Work::None(_)) { "Deferred(ready)" } else { "Deferred(later)" })
    }
}
