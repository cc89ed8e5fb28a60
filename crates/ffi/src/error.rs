//! Errors of failed libtorch calls.

use std::ffi::CStr;
use std::ptr;
use std::sync::LazyLock;

use crate::raw;

/// The kind of failure, as far as a caller can act on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The host or a device had no memory left (PyTorch: `torch.OutOfMemoryError`).
    OutOfMemory,
    /// A CUDA call failed, or this build has no CUDA (PyTorch: `torch.AcceleratorError`).
    Cuda,
    /// A store, a process group or the network between ranks failed (PyTorch: `torch.distributed.DistError`).
    Distributed,
    /// A call between ranks was still waiting at its timeout.
    Timeout,
    /// There is no file for a tensor that should be in one: the disk is full, say, or the folder is gone
    /// ([`in_files`](crate::host_memory::in_files)).
    Io,
    /// Anything else, usually a refused argument.
    Other,
}

/// A failed call into libtorch: its kind, and libtorch's message without the C++ stack trace.
///
/// [`trace`](Self::trace) has the stack trace; with `RUST_BACKTRACE` set, so has the
/// [`source`](std::error::Error::source). Otherwise it would bury the message, for example in the last lines of a rank
/// that a launcher shows.
#[derive(Debug)]
pub struct Error {
    kind: ErrorKind,
    message: String,
    trace: Trace,
}

/// Reads `RUST_BACKTRACE` as the standard library does, and once.
static TRACES_ARE_WANTED: LazyLock<bool> =
    LazyLock::new(|| std::env::var_os("RUST_BACKTRACE").is_some_and(|value| value != "0"));

impl std::fmt::Display for Error {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        TRACES_ARE_WANTED.then_some(&self.trace as _)
    }
}

/// libtorch's whole message, C++ stack trace included.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Trace(String);

impl Error {
    /// What kind of failure this is.
    pub fn kind(&self) -> ErrorKind {
        self.kind
    }

    /// libtorch's message, without its C++ stack trace.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// libtorch's whole message, C++ stack trace included.
    pub fn trace(&self) -> &Trace {
        &self.trace
    }

    /// A timeout of this crate's own in a wait between ranks.
    #[cfg(feature = "distributed")]
    pub(crate) fn timed_out(message: impl Into<String>) -> Self {
        Self { kind: ErrorKind::Timeout, ..Self::refused(message) }
    }

    /// A failure that this crate itself found before calling libtorch.
    pub(crate) fn refused(message: impl Into<String>) -> Self {
        let message = message.into();
        Self { kind: ErrorKind::Other, trace: Trace(message.clone()), message }
    }
}

impl From<tch::TchError> for Error {
    /// tch keeps only the text of a failure; the kind is recognised by libtorch's wording.
    fn from(error: tch::TchError) -> Self {
        let text = error.to_string();
        let kind = if text.contains("DefaultCPUAllocator: ")
            || ["CUDA out of memory", "CPU out of memory"].iter().any(|part| text.contains(part))
        {
            ErrorKind::OutOfMemory
        } else if text.contains("CUDA error") || text.contains("CUDNN_STATUS") || text.contains("CUBLAS_STATUS") {
            ErrorKind::Cuda
        } else if text.contains("no file of ") && text.contains(" bytes for a tensor in ") {
            ErrorKind::Io
        } else {
            ErrorKind::Other
        };
        // libtorch appends its stack trace after this line.
        let message = text.split("\nException raised from").next().unwrap_or(&text).to_owned();
        Self { kind, message, trace: Trace(text) }
    }
}

/// Runs one C call and turns its status into a `Result`.
pub(crate) fn check(call: impl FnOnce(*mut raw::Error) -> raw::Status) -> Result<(), Error> {
    let mut err = raw::Error { message: ptr::null_mut(), detail: ptr::null_mut() };
    let status = call(&mut err);
    if status == raw::OK {
        return Ok(());
    }
    let kind = match status {
        raw::OUT_OF_MEMORY => ErrorKind::OutOfMemory,
        raw::CUDA => ErrorKind::Cuda,
        raw::DISTRIBUTED => ErrorKind::Distributed,
        raw::TIMEOUT => ErrorKind::Timeout,
        raw::IO => ErrorKind::Io,
        _ => ErrorKind::Other,
    };
    let text = |pointer: *const std::ffi::c_char| {
        if pointer.is_null() {
            return "libtorch failed and had no memory left for its message".to_owned();
        }
        // SAFETY: the C++ side wrote a NUL-terminated string, which lives until `od_error_clear` below.
        unsafe { CStr::from_ptr(pointer) }.to_string_lossy().trim_end().to_owned()
    };
    let (message, detail) = (text(err.message), text(err.detail));
    // SAFETY: both strings were allocated by the C++ side or are null, and are not used after this.
    unsafe { raw::od_error_clear(&mut err) };
    Err(Error { kind, message, trace: Trace(detail) })
}

/// Takes over a string that the C++ side has made; null is empty.
///
/// # Safety
/// It is null, or NUL-terminated and the caller's to free.
pub(crate) unsafe fn take_text(text: *mut std::ffi::c_char) -> String {
    if text.is_null() {
        return String::new();
    }
    // SAFETY: NUL-terminated, as the caller promises.
    let taken = unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned();
    // SAFETY: the caller's to free, and not used again.
    unsafe { raw::od_string_free(text) };
    taken
}

/// Throws a planted C++ exception of the given sort; for tests that no exception crosses into Rust.
#[doc(hidden)]
pub fn test_throw(what: i32) -> Result<(), Error> {
    // SAFETY: `err` points to a live error slot for the length of the call.
    check(|err| unsafe { raw::od_test_throw(what, err) })
}
