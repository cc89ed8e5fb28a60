//! Small programs whose codes and counts a real device and the stand-in have to agree on.
//!
//! What each expects is from CUDA's documentation. Where one fails on a real device, the stand-in, which passes it, is
//! wrong in that place.

mod captures;
mod errors;
mod operators;
mod streams;

pub use captures::*;
pub use errors::*;
pub use operators::*;
pub use streams::*;

use std::fmt::{Debug, Display};

use anyhow::{Result, anyhow, ensure};
use overdrive_fakecuda::runtime::{self, Address, Code, Stream};

const OK: Code = 0;
const INVALID_VALUE: Code = 1;
const MEMORY_ALLOCATION: Code = 2;
const INVALID_DEVICE: Code = 101;
const INVALID_RESOURCE_HANDLE: Code = 400;
const ILLEGAL_STATE: Code = 401;
const CAPTURE_UNSUPPORTED: Code = 900;
const CAPTURE_INVALIDATED: Code = 901;
const CAPTURE_MERGE: Code = 902;
const CAPTURE_UNMATCHED: Code = 903;
const CAPTURE_UNJOINED: Code = 904;
const CAPTURE_ISOLATION: Code = 905;
const CAPTURE_IMPLICIT: Code = 906;
const CAPTURED_EVENT: Code = 907;
const CAPTURE_WRONG_THREAD: Code = 908;

/// What a program sees beside what CUDA's documentation says.
#[derive(Default)]
struct Seen(Vec<String>);

impl Seen {
    /// A code.
    fn code(&mut self, what: &str, found: Code, expected: Code) {
        let words = |code: Code| format!("{code} ({})", runtime::error_name(code));
        self.text(what, &words(found), &words(expected));
    }

    /// A code where a value would be, or a value.
    fn value<T: PartialEq + Debug>(&mut self, what: &str, found: T, expected: T) {
        self.text(what, &format!("{found:?}"), &format!("{expected:?}"));
    }

    fn text(&mut self, what: &str, found: &str, expected: &str) {
        if found != expected {
            self.0.push(format!("{what}: {found}, and not {expected}"));
        }
    }

    /// Leaves no error behind for the next program.
    fn end(self) -> Result<()> {
        runtime::device_synchronize();
        runtime::last_error();
        ensure!(self.0.is_empty(), "differs from CUDA's documentation:\n  {}", self.0.join("\n  "));
        Ok(())
    }
}

/// A call that has to succeed for the program to go on.
fn needs<T>(what: impl Display, made: Result<T, Code>) -> Result<T> {
    made.map_err(|code| anyhow!("{what}: {code} ({})", runtime::error_name(code)))
}

/// Device memory and pinned memory of as many bytes, and two streams that wait for no other.
struct Bench {
    device: Address,
    pinned: Address,
    stream: Stream,
    other: Stream,
}

const BYTES: usize = 4096;

impl Bench {
    fn new() -> Result<Self> {
        Ok(Self {
            device: needs("cudaMalloc", runtime::malloc(BYTES))?,
            pinned: needs("cudaHostAlloc", runtime::malloc_host(BYTES))?,
            stream: needs("cudaStreamCreate", runtime::stream(true))?,
            other: needs("cudaStreamCreate", runtime::stream(true))?,
        })
    }

    /// Fills the device memory.
    fn fill(&self, value: u8, stream: Stream) -> Code {
        runtime::fill(self.device, i32::from(value), BYTES, stream)
    }

    /// Copies the device memory to the pinned memory.
    fn read_back(&self, stream: Stream) -> Code {
        runtime::copy(self.pinned, self.device, BYTES, runtime::COPY_DEFAULT, stream)
    }

    /// The last byte of the pinned memory.
    fn last_byte(&self) -> u8 {
        runtime::pinned_byte(self.pinned + BYTES - 1)
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        runtime::device_synchronize();
        runtime::free(self.device);
        runtime::free_host(self.pinned);
        runtime::destroy_stream(self.stream);
        runtime::destroy_stream(self.other);
    }
}
