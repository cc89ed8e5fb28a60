//! Errors that pass through a module's forward pass.

use overdrive_ffi::Error as TorchError;

/// An error of something that modules call in their forward pass, such as a checkpointed function or a part of yours:
/// `?` turns it into a module's (`overdrive_nn::NnError`), though the crates do not know each other.
///
/// ```
/// #[derive(Debug, thiserror::Error)]
/// #[error("no expert takes token {0}")]
/// struct NoExpert(i64);
///
/// impl overdrive_core::ForwardError for NoExpert {}
/// ```
pub trait ForwardError: std::error::Error + Send + Sync + Sized + 'static {
    /// libtorch's error, if this is nothing else. A module adds its name to it.
    ///
    /// # Errors
    /// The error itself, if it is another one.
    fn into_torch(self) -> Result<TorchError, Self> {
        Err(self)
    }
}

impl ForwardError for TorchError {
    fn into_torch(self) -> Result<TorchError, Self> {
        Ok(self)
    }
}

impl ForwardError for tch::TchError {
    fn into_torch(self) -> Result<TorchError, Self> {
        Ok(self.into())
    }
}
