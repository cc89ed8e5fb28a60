//! Calls of Rust code by libtorch. Its errors and panics come out of the call into libtorch.

use std::any::Any;
use std::ffi::{CString, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};

use crate::error::{Error, ErrorKind};
use crate::raw;

/// Any error, which comes out of the call into libtorch with its message.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The value that something panicked with.
type Panic = Box<dyn Any + Send>;

/// Runs a callback. An error or a panic of it becomes a status, and is written to the caller's places.
///
/// # Safety
/// `panic` and `err` point to live and empty places.
pub(crate) unsafe fn answer(
    what: &str,
    panic: *mut *mut c_void,
    err: *mut raw::Error,
    run: impl FnOnce() -> Result<(), BoxError>,
) -> raw::Status {
    // Printing an error may panic too.
    let run = || run().map_err(|error| (status(&error), message(error.to_string())));
    let (status, message) = match catch_unwind(AssertUnwindSafe(run)) {
        Ok(Ok(())) => return raw::OK,
        Ok(Err(failed)) => failed,
        Err(payload) => {
            let text = payload.downcast_ref::<&str>().copied();
            let text = text.or_else(|| payload.downcast_ref::<String>().map(String::as_str));
            let text = message(format!("{what} panicked: {}", text.unwrap_or("of unknown cause")));
            // SAFETY: the caller's place.
            unsafe { *panic = Box::into_raw(Box::new(payload)).cast() };
            (raw::OTHER, text)
        }
    };
    // SAFETY: as above.
    unsafe { raw::od_error_set(err, message.as_ptr()) };
    status
}

/// Resumes the panic of a callback, if there was one.
///
/// # Safety
/// `panic` is null, or was made by [`answer`] and is given here once.
pub(crate) unsafe fn resume(panic: *mut c_void) {
    if !panic.is_null() {
        // SAFETY: as above.
        resume_unwind(*unsafe { Box::from_raw(panic.cast::<Panic>()) });
    }
}

pub(crate) extern "C" fn drop_panic(panic: *mut c_void) {
    drop_box::<Panic>(panic);
}

/// Drops a `Box<T>` that C++ has kept.
pub(crate) extern "C" fn drop_box<T>(pointer: *mut c_void) {
    // SAFETY: the pointer was made of a box of this type, and is given here once.
    let owned = unsafe { Box::from_raw(pointer.cast::<T>()) };
    if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(owned))) {
        std::mem::forget(panic);
    }
}

/// The kind of an error that libtorch may have caused.
fn status(error: &BoxError) -> raw::Status {
    let kind = match error.downcast_ref::<Error>() {
        Some(error) => error.kind(),
        // It may contain an error of libtorch, whose kind is recognised by its wording.
        None => Error::from(tch::TchError::Torch(error.to_string())).kind(),
    };
    match kind {
        ErrorKind::OutOfMemory => raw::OUT_OF_MEMORY,
        ErrorKind::Cuda => raw::CUDA,
        ErrorKind::Distributed => raw::DISTRIBUTED,
        ErrorKind::Timeout => raw::TIMEOUT,
        ErrorKind::Io => raw::IO,
        ErrorKind::Other => raw::OTHER,
    }
}

/// Copies a message to a C string, without libtorch's stack trace, which tch leaves in.
fn message(text: String) -> CString {
    let text = text.split("\nException raised from").next().unwrap_or_default().replace('\0', "\\0");
    CString::new(text).unwrap_or_default()
}
