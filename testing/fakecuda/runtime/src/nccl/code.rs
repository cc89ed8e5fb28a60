//! NCCL's results.

use std::cell::RefCell;
use std::ffi::{CString, c_char};
use std::sync::{Mutex, PoisonError};

/// A code of `ncclResult_t`; 0 is success.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Code(pub i32);

macro_rules! codes {
    ($($constant:ident = $code:literal, $text:literal;)+) => {
        impl Code {
            $(#[doc = $text] pub const $constant: Self = Self($code);)+

            /// The text of `ncclGetErrorString`, with a zero byte at its end.
            pub fn words(self) -> &'static str {
                match self.0 {
                    $($code => concat!($text, "\0"),)+
                    _ => "unknown result code\0",
                }
            }
        }
    };
}

codes! {
    SUCCESS = 0, "no error";
    UNHANDLED_CUDA = 1, "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    SYSTEM = 2, "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    INTERNAL = 3, "internal error - please report this issue to the NCCL developers";
    INVALID_ARGUMENT = 4, "invalid argument (run with NCCL_DEBUG=WARN for details)";
    INVALID_USAGE = 5, "invalid usage (run with NCCL_DEBUG=WARN for details)";
    REMOTE = 6, "remote process exited or there was a network error";
    IN_PROGRESS = 7, "NCCL operation in progress";
}

/// A code, and what happened in words.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Failure {
    pub code: Code,
    pub text: String,
}

impl Failure {
    pub fn new(code: Code, text: impl Into<String>) -> Self {
        Self { code, text: text.into() }
    }
}

impl From<std::io::Error> for Failure {
    fn from(error: std::io::Error) -> Self {
        Self::new(Code::SYSTEM, error.to_string())
    }
}

/// The last failure in words.
static LAST: Mutex<String> = Mutex::new(String::new());

/// The code that a C function returns. A failure is also stored as the last one.
pub fn result(result: Result<Code, Failure>) -> i32 {
    match result {
        Ok(code) => code.0,
        Err(failure) => {
            tell(&failure.text);
            failure.code.0
        }
    }
}

/// Keeps a text for `ncclGetLastError`.
pub fn tell(text: &str) {
    text.clone_into(&mut LAST.lock().unwrap_or_else(PoisonError::into_inner));
}

/// The last failure of any thread. The text stays valid until the thread's next call of this.
pub fn last() -> *const c_char {
    thread_local! {
        static KEPT: RefCell<CString> = RefCell::default();
    }
    let text = LAST.lock().unwrap_or_else(PoisonError::into_inner).replace('\0', " ");
    KEPT.set(CString::new(text).unwrap_or_default());
    KEPT.with_borrow(|text| text.as_ptr())
}
