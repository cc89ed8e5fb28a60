//! Smaller batches where memory runs out.

mod micro_batch;

use std::any::Any;
use std::error::Error as StdError;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use overdrive_core::{TorchError, TorchErrorKind};
use overdrive_ffi::autograd::BoxError;
use overdrive_ffi::cuda;

use crate::error::MemoryError;
pub use micro_batch::AutoMicroBatch;

/// Calls `run` with `largest`, and with half of it as long as memory runs out, down to 1. Returns the size that fit, and
/// what `run` returned.
///
/// `run` should do what the training does with the most memory: a forward and a backward pass, and a step of the
/// optimizer, whose state is made then. What tensors of a failed try had is freed before the next one.
///
/// # Errors
/// When a batch of 1 does not fit, and any other error of `run`.
///
/// # Source
/// `accelerate.utils.find_executable_batch_size`
pub fn find_batch_size<T, E: Into<BoxError>>(
    largest: usize,
    mut run: impl FnMut(usize) -> Result<T, E>,
) -> Result<(usize, T), MemoryError> {
    let mut size = largest.max(1);
    loop {
        match or_out_of_memory(|| run(size)) {
            Tried::Fits(result) => return Ok((size, result)),
            Tried::OutOfMemory(_) if size > 1 => size /= 2,
            Tried::OutOfMemory(source) => return Err(MemoryError::TooLarge { source }),
            Tried::Panicked(panic) => resume_unwind(panic),
            Tried::Failed(source) => {
                return Err(MemoryError::Function { scope: format!("a batch of {size}"), source });
            }
        }
    }
}

/// What became of something that may need too much memory.
enum Tried<T> {
    Fits(T),
    OutOfMemory(BoxError),
    Failed(BoxError),
    /// It panicked, and not for want of memory.
    Panicked(Box<dyn Any + Send>),
}

/// Runs something, and frees unused memory of GPUs if there was too little. tch's operators panic when they fail: such a
/// panic counts as their error.
fn or_out_of_memory<T, E: Into<BoxError>>(run: impl FnOnce() -> Result<T, E>) -> Tried<T> {
    let error = match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(result)) => return Tried::Fits(result),
        Ok(Err(error)) => error.into(),
        Err(panic) => match text_of(&*panic) {
            Some(text) if says_out_of_memory(text) => text.to_owned().into(),
            _ => return Tried::Panicked(panic),
        },
    };
    if !is_out_of_memory(&*error) {
        return Tried::Failed(error);
    }
    // Without a GPU there is nothing to free.
    let _ = cuda::empty_cache();
    Tried::OutOfMemory(error)
}

/// Whether an error, or what it was caused by, is that the host or a device had no memory left.
///
/// # Source
/// `isinstance(error, torch.OutOfMemoryError)`
#[doc(alias = "OutOfMemoryError")]
pub fn is_out_of_memory(error: &(dyn StdError + 'static)) -> bool {
    let mut next = Some(error);
    while let Some(error) = next {
        let kind = error.downcast_ref::<TorchError>().map(TorchError::kind);
        if kind == Some(TorchErrorKind::OutOfMemory) || says_out_of_memory(&error.to_string()) {
            return true;
        }
        next = error.source();
    }
    false
}

/// tch keeps only the text of a failure, and panics with it.
fn says_out_of_memory(text: &str) -> bool {
    TorchError::from(tch::TchError::Torch(text.to_owned())).kind() == TorchErrorKind::OutOfMemory
}

/// The text of a panic, if it has one.
pub(crate) fn text_of(panic: &(dyn Any + Send)) -> Option<&str> {
    panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied())
}
